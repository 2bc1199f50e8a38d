"""What malloc does with large tensors while a model moves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_embrace.hydra.heap import map_large_ones

#: says how many bytes malloc maps by themselves for a tensor of 6 MB, inside and afterwards; it may use a hole instead,
#: so that there must be none yet
_PROGRAM = """
import ctypes, torch
from lightning_embrace.hydra.heap import map_large_ones

fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
Info = type("Info", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in fields.split()]})
library = ctypes.CDLL(None)
library.mallinfo2.restype = Info

def mapped():
    before = library.mallinfo2().hblkhd
    tensor = torch.empty(6 << 20, dtype=torch.uint8)
    return library.mallinfo2().hblkhd - before

torch.empty(30 << 20, dtype=torch.uint8)  # from here on glibc keeps memory of up to so much
undo = map_large_ones()
print(mapped())
undo()
print(mapped())
"""


def test_large_tensors_are_mappings_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model moves, so that they leave no holes; afterwards malloc does as it has."""
    for variable in ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(variable, raising=False)
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    if "mallinfo2" in done.stderr:
        pytest.skip("another malloc than glibc's")
    assert done.returncode == 0, done.stderr
    inside, afterwards = map(int, done.stdout.split())
    assert inside >= 6 << 20 and afterwards == 0


def test_what_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    assert map_large_ones() is None
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1048576")
    assert map_large_ones() is None
