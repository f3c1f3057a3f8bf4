"""Rules of the house that no type checker sees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import slipstream

SOURCE = Path(slipstream.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

GENERATORS = {"random", "secrets"}
DRAWS = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("multinomial", "bernoulli", "normal", "poisson", "dropout"),
    *("normal_", "uniform_", "exponential_", "random_", "bernoulli_", "trunc_normal_"),
    *("Generator", "Philox", "RandomState", "default_rng", "manual_seed", "seed_all"),
    *("urandom", "uuid4"),
}


def random_names(tree: ast.AST) -> Iterator[str]:
    """Modules, functions and classes that draw random numbers, as they are used in code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in GENERATORS)
        elif isinstance(node, ast.ImportFrom):
            if node.module in GENERATORS:
                yield node.module
            yield from (alias.name for alias in node.names if alias.name in DRAWS | GENERATORS)
        elif isinstance(node, ast.Attribute) and node.attr in DRAWS | GENERATORS:
            yield node.attr


def stdout_prints(tree: ast.AST) -> Iterator[int]:
    """Lines that print anywhere but to an explicit file."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
            and not any(keyword.arg == "file" for keyword in node.keywords)
        ):
            yield node.lineno


def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_only_the_noise_file_touches_random_generators(path: Path) -> None:
    found = set(random_names(parsed(path)))
    if path == SOURCE / "maths" / "noise.py":
        assert found >= {"secrets", "random", "Philox"}  # or this test looks in the wrong place
    else:
        assert not found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_only_the_command_line_prints(path: Path) -> None:
    if path.relative_to(SOURCE).parts[0] not in {"cli", "cli.py", "bench"}:
        assert list(stdout_prints(parsed(path))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import random",
        "import secrets",
        "from random import Random",
        "from torch import Generator",
        "import numpy as np; np.random.default_rng()",
        "torch.rand(3)",
        "torch.manual_seed(0)",
        "torch.cuda.manual_seed(0)",
        "p.multinomial(1)",
        "x.exponential_()",
        "torch.Generator()",
    ],
)
def test_the_search_finds(line: str) -> None:
    assert list(random_names(ast.parse(line)))


def test_the_search_finds_prints() -> None:
    assert list(stdout_prints(ast.parse("print(1)\nprint(2, file=log)\nx.print()"))) == [1]
