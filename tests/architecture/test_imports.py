"""What product code may import, beyond the contracts in pyproject.toml that `make check` runs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("runtime", "pallas_kernels", "control_plane", "ui")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
FORBIDDEN = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "torch", "transformers"}
PROMISE = "no jax"
HOST_ONLY = (
    "runtime.config", "runtime.request", "runtime.errors", "runtime.engine.stats", "runtime.engine.commands",
    "runtime.engine.tokenizer", "runtime.engine.detokenizer", "runtime.engine.chat_template",
    "runtime.schedule.plan", "runtime.schedule.sequence", "runtime.schedule.policy", "runtime.schedule.scheduler",
    "runtime.cache.page_allocator", "runtime.cache.prefix_cache", "runtime.ladder.bucket", "runtime.ladder.ladder",
    "control_plane.schemas",
)  # fmt: skip


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_nothing_loads_code_from_data_and_nothing_needs_torch(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not {name.split(".")[0] for name in imported(tree)} & FORBIDDEN
    names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    names |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert not any(name.startswith("ragged_dot") for name in names), (
        "a dense product over all experts in disguise"
    )


def test_modules_that_promise_no_jax_keep_it(graph: grimp.ImportGraph) -> None:
    promised = {
        module_name(p)
        for p in SOURCES
        if PROMISE in (ast.get_docstring(ast.parse(p.read_text(encoding="utf-8"))) or "").lower()
    }
    checked = sorted(promised | {name for name in HOST_ONLY if name in graph.modules})
    assert len(checked) >= 10
    chains = {name: graph.find_shortest_chain(name, "jax") for name in checked}
    assert not {name: chain for name, chain in chains.items() if chain}


def test_packages_hold_a_line_and_nothing_else() -> None:
    """So that importing a leaf never imports JAX by accident."""
    for path in SOURCES:
        if path.name == "__init__.py":
            body = ast.parse(path.read_text(encoding="utf-8")).body
            assert len(body) == 1, path
            assert isinstance(body[0], ast.Expr), path
