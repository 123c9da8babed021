"""Run a benchmark by its room and name.

    python benchmarks                     # list them
    python benchmarks speed/search --help

``disc.py`` and ``copydays.py`` run by their path as well.
"""

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark that the first argument names with the other arguments."""
    found = benchmarks()
    name = arguments[0].removesuffix(".py") if arguments else ""
    if name not in found:
        lines = "\n".join(f"  {name:24}{purpose}" for name, purpose in found.items())
        sys.exit(f"expected the name of a benchmark, got {name or 'none'}:\n{lines}")
    sys.argv = [str(HERE / f"{name}.py"), *arguments[1:]]
    runpy.run_module(name.replace("/", "."), run_name="__main__", alter_sys=True)


def benchmarks() -> dict[str, str]:
    """Every file here that runs on its own, as ``room/name``, with the first line it says."""
    found = {}
    for path in sorted(HERE.rglob("*.py")):
        text = path.read_text()
        if path != Path(__file__) and '\nif __name__ == "__main__":' in text:
            name = path.relative_to(HERE).with_suffix("").as_posix()
            found[name] = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
