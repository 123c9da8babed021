"""The figures in the adapters' page are those that were measured."""

from pathlib import Path

import readme_tables

PAGE = Path(readme_tables.README).parent / "docs" / "adapters.md"


def test_the_tables_agree_with_the_results() -> None:
    text = PAGE.read_text()
    assert "table:search_faiss" in text and "table:faults_server" in text
    again = "run python benchmarks/readme_tables.py --readme docs/adapters.md"
    assert readme_tables.rewritten(text) == text, again
