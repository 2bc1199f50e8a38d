"""The part of the matrix that the suite runs: a fixed pairwise sample, which test_sample.py checks."""

from tests.exactness.cases import Case

SAMPLE = [
    Case("sgd, dense", "embedding", 1, 2),
    Case("momentum, dense", "two tables", 1, 16),
    Case("adam, dense", "bag", 1, 10),
    Case("adamw, dense", "embedding", 1, 2),
    Case("adagrad, dense", "two tables", 1, 16),
    Case("sgd, sparse", "bag", 1, 10),
    Case("adagrad, sparse", "embedding", 1, 2),
    Case("sparseadam, sparse", "two tables", 1, 16),
    Case("sparseadam by hand, sparse", "bag", 1, 10),
    Case("sgd, dense", "bag", 2, 16),
    Case("momentum, dense", "embedding", 2, 10),
    Case("adam, dense", "two tables", 2, 2),
    Case("adamw, dense", "bag", 2, 16),
    Case("adagrad, dense", "embedding", 2, 10),
    Case("sgd, sparse", "two tables", 2, 2),
    Case("adagrad, sparse", "bag", 2, 16),
    Case("sparseadam, sparse", "embedding", 2, 10),
    Case("sparseadam by hand, sparse", "two tables", 2, 2),
    Case("sgd, dense", "two tables", 3, 10),
    Case("momentum, dense", "bag", 3, 2),
    Case("adam, dense", "embedding", 3, 16),
    Case("adamw, dense", "two tables", 3, 10),
    Case("adagrad, dense", "bag", 3, 2),
    Case("sgd, sparse", "embedding", 3, 16),
    Case("adagrad, sparse", "two tables", 3, 10),
    Case("sparseadam, sparse", "bag", 3, 2),
    Case("sparseadam by hand, sparse", "embedding", 3, 16),
]
