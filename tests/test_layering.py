"""The house keeps its shape: who may import whom, read from the source of every file."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sscd_vec"
STDLIB = sys.stdlib_module_names

# Rooms below all others: files, locks, progress, downloads, models, Parquet files.
FOUNDATION = {
    f"sscd_vec.{name}" for name in ("files", "locks", "progress", "download", "models", "shards")
}

# What each room may import besides the standard library and itself.
ROOMS: dict[str, set[str]] = {
    "kernels": {"torch", "triton", "numpy"},
    "normalize": {"numpy", "safetensors"},
    "encoder": {
        "torch",
        "torchvision",
        "safetensors",
        "PIL",
        "numpy",
        "rich",
        "openvino",
        "onnx",
        "onnxruntime",
        "onnxscript",
        "sscd_vec.kernels",
    },
    "trainer": {
        "torch",
        "torchvision",
        "PIL",
        "numpy",
        "rich",
        "safetensors",
        "tensorboard",
        "sscd_vec.kernels",
        "sscd_vec.encoder",
        "sscd_vec.normalize",
        "sscd_vec.metrics",
        "sscd_vec.predictions",
        "sscd_vec.plots",
    },
    "adapters": {"numpy", "safetensors", "sscd_vec.normalize"},
    "bank": {
        "numpy",
        "PIL",
        "sscd_vec.adapters",
        "sscd_vec.encoder",
        "sscd_vec.normalize",
        "sscd_vec.verify",
    },
    "verify": {"numpy", "cv2"},
    "batch.py": {"numpy", "sscd_vec.encoder", "sscd_vec.normalize", "sscd_vec.bank"},
    "encoding.py": {"ray", "sscd_vec.bank", "sscd_vec.batch"},
    "shards.py": {"numpy", "pyarrow", "sscd_vec.files"},
    "files.py": set(),
    "locks.py": {"sscd_vec.files", "filelock"},
    "progress.py": {"rich"},
    "download.py": {"sscd_vec.files"},
    "models.py": FOUNDATION,
    "metrics.py": {"numpy", "sscd_vec.predictions"},
    "predictions.py": {"numpy"},
    "plots.py": {"numpy", "matplotlib"},
}

# What a corner of a room may import on top of that.
CORNERS: dict[str, set[str]] = {
    "adapters/faiss/": {"faiss"},
    "adapters/products.py": {"faiss"},
    "adapters/milvus/": {"pymilvus", "grpc", "ml_dtypes"},
    "adapters/threatexchange.py": {"threatexchange", "sscd_vec.encoder"},
    "trainer/__main__.py": {"sscd_vec.cli"},
}

# Host libraries that only one corner of the tree may touch.
ONLY_IN: dict[str, str | tuple[str, ...]] = {
    "faiss": ("adapters/faiss/", "adapters/products.py"),
    "pymilvus": "adapters/milvus/",
    "threatexchange": "adapters/threatexchange.py",
    "matplotlib": "plots.py",
    "cv2": "verify/",
    "ray": "encoding.py",
    "pyarrow": "shards.py",
}

SOURCES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def imports(source: str) -> set[str]:
    """What a file imports, inside functions too: top-level names, or ``sscd_vec.room``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {_room(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute in this project"
            if node.module == "sscd_vec":
                found |= {_room(f"sscd_vec.{alias.name}") for alias in node.names}
            elif node.module:
                found.add(_room(node.module))
    return {name for name in found if name.split(".")[0] not in STDLIB}


def _room(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "sscd_vec" else parts[0]


@pytest.mark.parametrize("file", [f for f in SOURCES if f.split("/")[0] in ROOMS])
def test_room_imports_only_what_it_may(file: str) -> None:
    room = file.split("/")[0]
    own = f"sscd_vec.{room.removesuffix('.py')}"
    corners = [extra for corner, extra in CORNERS.items() if file.startswith(corner)]
    below = set() if f"sscd_vec.{room.removesuffix('.py')}" in FOUNDATION else FOUNDATION
    allowed = ROOMS[room].union({own}, below, *corners)
    assert imports((PACKAGE / file).read_text()) <= allowed


@pytest.mark.parametrize("package", ONLY_IN)
def test_host_library_is_imported_in_one_place(package: str) -> None:
    users = [f for f in SOURCES if package in imports((PACKAGE / f).read_text())]
    assert users and all(user.startswith(ONLY_IN[package]) for user in users)


def test_imports_finds_every_form() -> None:
    source = (
        "import os, faiss.contrib\n"
        "from sscd_vec.encoder.model import x\n"
        "def f():\n"
        "    from PIL import Image\n"
    )
    assert imports(source) == {"faiss", "sscd_vec.encoder", "PIL"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("sscd_vec", {"torch", "faiss", "pymilvus", "numpy"}),
        ("sscd_vec.normalize", {"torch", "faiss", "pymilvus"}),
        ("sscd_vec.files", {"torch", "faiss", "pymilvus", "numpy"}),
        ("sscd_vec.locks", {"torch", "faiss", "pymilvus", "numpy"}),
        ("sscd_vec.progress", {"torch", "faiss", "pymilvus", "numpy", "rich"}),
        ("sscd_vec.models", {"torch", "faiss", "pymilvus", "numpy", "rich"}),
        ("sscd_vec.encoder.images", {"torch", "faiss", "pymilvus"}),
        ("sscd_vec.shards", {"torch", "faiss", "pymilvus", "pyarrow"}),
        ("sscd_vec.batch", {"torch", "faiss", "pymilvus", "pyarrow", "ray"}),
        ("sscd_vec.metrics", {"torch", "faiss", "pymilvus"}),
        ("sscd_vec.verify", {"cv2", "torch", "faiss", "pymilvus"}),
        ("sscd_vec.cli", {"torch", "faiss", "pymilvus"}),
        ("sscd_vec.adapters.matches", {"torch", "faiss", "pymilvus"}),
        ("sscd_vec.bank", {"torch", "faiss", "pymilvus", "numpy"}),
        ("sscd_vec.bank.bank", {"torch", "faiss", "pymilvus"}),
        ("sscd_vec.bank.report", {"torch", "faiss", "pymilvus"}),
    ],
)
def test_light_rooms_stay_light(module: str, heavy: set[str]) -> None:
    script = (
        f"import sys, {module}; print(' '.join(m for m in {sorted(heavy)} if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
