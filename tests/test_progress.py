"""The one progress bar."""

import pytest

from sscd_vec.progress import progress_bar


@pytest.mark.parametrize("unit", ["items", "bytes"])
def test_a_bar_shows_title_counts_figures_and_lines(
    unit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("encoding [x]", 4, show=True, unit=unit) as bar:  # type: ignore[arg-type]
        bar.advance()
        bar.advance(2)
        bar.say("[bold] is plain text")
        bar.update(4, 4, title="done", figures="loss 1.5")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "[bold] is plain text" in shown.err
    assert "done" in shown.err
    assert "loss 1.5" in shown.err
    assert ("4/4" if unit == "items" else "4/4 bytes") in shown.err


def test_nothing_is_shown_in_a_pipe_or_when_told_not_to(capsys: pytest.CaptureFixture[str]) -> None:
    for show in (None, False):
        with progress_bar("encoding", 4, show=show) as bar:
            bar.advance()
            bar.update(3, figures="x")
            bar.say("hello")
    assert capsys.readouterr() == ("", "")


def test_a_tracked_sequence_counts_each_item_once_it_is_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_bar("encoding", 9, show=True) as bar:
        bar.advance(5)
        assert list(bar.track(["a", "b"], "looking")) == ["a", "b"]
    shown = capsys.readouterr().err
    assert "looking" in shown and "2/2" in shown
