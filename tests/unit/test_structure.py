"""Rules about the source itself: layers, exports, docstrings, sizes. Each failure names a line."""

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

import lightning_mcore
import lightning_mcore.callbacks

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "lightning_mcore"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the bottom up. A module may import the layers below its own, and modules of its own layer as
# long as those do not import it back (Python would refuse a cycle at import anyway).
LAYERS = [
    {"errors", "version"},
    {"names", "safetensors_file", "index_file", "watch", "findings", "userbuffers", "frames"},
    {"config", "userbuffers_plan", "timeline", "flops"},
    {"layout", "placement"},
    {"topology"},
    {"topology_probe"},
    {"switches"},
    {"experts"},
    {"environment"},
    {"header", "engine_fields"},
    {"_mcore"},
    {"parallel_state"},
    {"stage", "sequential", "randomness", "ranges", "nonfinite"},
    {"build"},
    {"batch"},
    {"context", "_launchers", "_lightning"},
    {"activation_shape"},
    {"graphs"},
    {"step_log", "step_output", "schedule", "outputs", "data_check", "metrics", "loaders"},
    {"optimizer", "precision"},
    {"hook_gradients", "trained_weights"},
    {"wrapping", "state_dict", "optimizer_state", "checkpoint_files"},
    {"agreement"},
    {"checkpoint_save"},
    {"checkpoint", "stored", "plain_file"},
    {"plain"},
    {"export"},
    {"import_plain"},
    {"run"},
    {"prepare", "processes", "trainer_check"},
    {"checkpoint_hooks"},
    {"loop_hooks"},
    {"strategy"},
    {"callbacks", "check", "testing"},
    {"tuning"},
    {"tune_command"},
    {"cli"},
    {"__main__"},
    {""},  # the package's own __init__
]
LAYER_OF = {name: index for index, names in enumerate(LAYERS) for name in names}
WITHOUT_LIGHTNING = {name for names in LAYERS[: LAYER_OF["_mcore"] + 1] for name in names}


def component(path: Path) -> str:
    """Part of the package that a file belongs to: ``layout``, ``_mcore``; "" for ``__init__``."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(path: Path):
    """Every import in a file as (dotted name, line), also inside functions and TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def in_package(name: str) -> str | None:
    """The component that an imported dotted name belongs to, ``None`` for other packages."""
    parts = name.split(".")
    if parts[0] != "lightning_mcore":
        return None
    return parts[1] if parts[1:] and parts[1] in LAYER_OF else ""


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_file = pytest.mark.parametrize("path", FILES, ids=relative)


def test_there_is_something_to_check():
    assert len(FILES) > 10
    assert any(name.startswith("megatron") for p in FILES for name, _ in imports(p))
    assert in_package("lightning_mcore.layout.Layout") == "layout"
    assert in_package("lightning_mcore.__version__") == ""
    assert in_package("lightning.pytorch") is None


@each_file
def test_every_module_has_a_layer(path):
    assert component(path) in LAYER_OF, f"{relative(path)}: give it a place in LAYERS"


@each_file
def test_imports_go_one_way(path):
    own = component(path)
    for name, line in imports(path):
        other = in_package(name)
        if other is None or other == own:
            continue
        assert LAYER_OF[other] <= LAYER_OF[own], (
            f"{relative(path)}:{line}: {own or '__init__'} imports {name}, which is above it"
        )


@each_file
def test_only_the_boundary_imports_the_engine(path):
    for name, line in imports(path):
        if name.split(".")[0] == "megatron":
            assert component(path) == "_mcore", f"{relative(path)}:{line}: imports {name}"


@each_file
def test_lower_layers_work_without_lightning(path):
    if component(path) not in WITHOUT_LIGHTNING:
        return
    for name, line in imports(path):
        assert name.split(".")[0] not in ("lightning", "pytorch_lightning"), (
            f"{relative(path)}:{line}: imports {name}"
        )


@each_file
def test_files_stay_readable_in_one_sitting(path):
    lines = len(path.read_text().splitlines())
    assert lines <= 400, f"{relative(path)} has {lines} lines; split it by concept"


@each_file
def test_everything_public_has_a_docstring(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{relative(path)}: the module has none"
    for owner in (tree, *(n for n in tree.body if isinstance(n, ast.ClassDef))):
        if isinstance(owner, ast.ClassDef) and owner.name.startswith("_"):
            continue
        for node in owner.body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            marks = {ast.unparse(d).split(".")[-1] for d in node.decorator_list}
            if node.name.startswith("_") or marks & {"override", "setter", "overload"}:
                continue
            assert ast.get_docstring(node), f"{relative(path)}:{node.lineno}: {node.name}"


@each_file
def test_all_lists_every_public_definition(path):
    tree = ast.parse(path.read_text())
    listed = None
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = set(ast.literal_eval(node.value))
    if listed is None or component(path) == "_mcore":  # where it is for the package alone
        return
    defined = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    missing = {name for name in defined if not name.startswith("_")} - listed
    assert not missing, f"{relative(path)}: __all__ lacks {sorted(missing)}"


@pytest.mark.parametrize("module", [lightning_mcore, lightning_mcore.callbacks])
def test_packages_export_what_all_says(module):
    exported = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    dunders = {name for name in module.__all__ if name.startswith("__")}
    assert module.__all__ == sorted(exported | dunders)
    assert all(hasattr(module, name) for name in module.__all__)


def test_the_changelog_knows_the_version():
    assert f"## [{lightning_mcore.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_no_path_of_one_machine_is_written_down():
    pattern = re.compile(r"(?<![\w./{}])/(?:home|root|Users|work|mnt|tmp)/\w+")
    folders = ("src", "tests", "docs", "examples", "benchmarks", "constraints")
    files = [
        p
        for folder in folders
        for p in (ROOT / folder).rglob("*")
        if p.is_file() and "cache" not in str(p)
    ]
    for path in [*files, *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]:
        if path.suffix in (".py", ".md", ".txt", ".toml", "") and path != Path(__file__):
            found = pattern.search(path.read_text())
            assert not found, f"{relative(path)}: {found[0]}"


def test_links_between_documents_lead_somewhere():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{relative(path)}: {target}"
