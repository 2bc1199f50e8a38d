"""The shortest schedule there is, as a mixed-integer linear programme over unit time steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array


def optimum(tasks: Sequence[Sequence[int]], devices: int, horizon: int) -> int:
    """Of shards that take whole steps each, in their task's order, uninterrupted. Since all shards take whole steps, no
    schedule that begins some of them within a step is shorter.

    Args:
        tasks: For each task the steps of its shards.
        devices: How many; any task may compute on any.
        horizon: A makespan that can be kept.

    Returns:
        The makespan in steps.
    """
    # a variable: this shard of this task begins at this step; the last one: the makespan
    begins = [
        (task, shard, step)
        for task, shards in enumerate(tasks)
        for shard, length in enumerate(shards)
        for step in range(sum(shards[:shard]), horizon - sum(shards[shard:]) + 1)
    ]
    makespan = len(begins)
    rows: list[tuple[dict[int, float], float, float]] = []  # coefficients, lower and upper bound
    where: dict[tuple[int, int], list[int]] = {}
    for index, (task, shard, _) in enumerate(begins):
        where.setdefault((task, shard), []).append(index)
    for (task, shard), indices in where.items():
        rows.append((dict.fromkeys(indices, 1.0), 1, 1))  # begins once
        ends = {i: begins[i][2] + float(tasks[task][shard]) for i in indices}
        following = where.get((task, shard + 1))
        if following is None:
            rows.append(({**ends, makespan: -1.0}, -np.inf, 0))
        else:
            rows.append(({**ends, **{i: -float(begins[i][2]) for i in following}}, -np.inf, 0))
    for now in range(horizon):
        running = [i for i, (task, shard, step) in enumerate(begins) if step <= now < step + tasks[task][shard]]
        rows.append((dict.fromkeys(running, 1.0), 0, devices))
    cells = [(value, row, column) for row, (values, _, _) in enumerate(rows) for column, value in values.items()]
    values, at_rows, at_columns = zip(*cells)
    matrix = coo_array((values, (at_rows, at_columns)), shape=(len(rows), makespan + 1)).tocsr()
    solved = milp(
        np.r_[np.zeros(makespan), 1.0],
        constraints=LinearConstraint(matrix, [low for _, low, _ in rows], [high for _, _, high in rows]),
        integrality=np.ones(makespan + 1),
        bounds=Bounds(0, np.r_[np.ones(makespan), float(horizon)]),
        options={"time_limit": 20},
    )
    assert solved.status == 0, solved.message  # 0: proven
    return round(solved.fun)
