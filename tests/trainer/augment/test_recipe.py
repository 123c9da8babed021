from dataclasses import fields

import numpy as np
import pytest

from sscd_vec.trainer.augment.choices import (
    COMBINED,
    COUNTED,
    CUTMIX,
    MIXUP,
    NO_MIX,
    PASTE,
    WHOLE_WHEN_COMPOSED,
    Choices,
    draw,
    draw_pairs,
    generator,
)
from sscd_vec.trainer.augment.colour import FILTERS
from sscd_vec.trainer.augment.recipe import (
    ADVANCED,
    ADVANCED_MIXUP,
    NOTHING,
    RECIPES,
    SIMCLR,
    STRONG_BLUR,
)

COUNT = 60_000


@pytest.fixture(scope="module")
def choices() -> Choices:
    return draw(ADVANCED_MIXUP, COUNT, generator(7, 0))


@pytest.mark.parametrize(
    ("what", "probability"),
    [
        ("flip", 0.5),
        ("quarters", 0.05),
        ("angle", 0.05),
        ("grayscale", 0.2),
        ("blur_sigma", 0.5),
    ],
)
def test_probabilities_by_counting(choices: Choices, what: str, probability: float) -> None:
    happened = np.count_nonzero(getattr(choices, what)) / COUNT
    assert abs(happened - probability) < 5 * (probability * (1 - probability) / COUNT) ** 0.5


@pytest.mark.parametrize(("what", "probability"), [("text", 0.1), ("emoji", 0.2), ("jpeg", 0.2)])
def test_probabilities_of_what_minus_one_turns_off(
    choices: Choices, what: str, probability: float
) -> None:
    happened = np.mean(getattr(choices, what) >= 0)
    assert abs(happened - probability) < 5 * (probability * (1 - probability) / COUNT) ** 0.5


def test_mixing_probabilities_and_gamma(choices: Choices) -> None:
    for kind in (MIXUP, CUTMIX):
        assert abs(np.mean(choices.mix == kind) - 0.025) < 5 * (0.025 * 0.975 / COUNT) ** 0.5
    # Beta(2, 2): mean 1/2, variance 1/20.
    assert choices.gamma.mean() == pytest.approx(0.5, abs=5 * (0.05 / COUNT) ** 0.5)
    assert choices.gamma.var() == pytest.approx(0.05, rel=0.03)
    assert (choices.partner != np.arange(COUNT)).all(), "nobody is its own partner"


def test_paste_is_apart_from_the_papers_mixing() -> None:
    assert all(recipe.paste == 0 for recipe in RECIPES.values())
    drawn = draw(ADVANCED_MIXUP.with_changes({"paste": 0.1}), COUNT, generator(0, 0)).mix
    for kind, probability in ((MIXUP, 0.025), (CUTMIX, 0.025), (PASTE, 0.1)):
        spread = (probability * (1 - probability) / COUNT) ** 0.5
        assert abs(np.mean(drawn == kind) - probability) < 5 * spread


def test_jitter_probability_ranges_and_orders(choices: Choices) -> None:
    off = (choices.colour == [1, 1, 1, 0]).all(axis=1)
    assert abs(off.mean() - 0.2) < 5 * (0.2 * 0.8 / COUNT) ** 0.5
    on = choices.colour[~off]
    assert on[:, :3].min() >= 0.2 and on[:, :3].max() <= 1.8
    assert np.abs(on[:, 3]).max() <= 0.2
    orders, counts = np.unique(choices.colour_order, axis=0, return_counts=True)
    assert len(orders) == 24
    assert counts.min() > 0.8 * COUNT / 24


def test_ranges(choices: Choices) -> None:
    blurred = choices.blur_sigma[choices.blur_sigma > 0]
    assert blurred.min() >= 1 and blurred.max() <= 5
    assert choices.crop_area.min() >= 0.08 and choices.crop_area.max() <= 1
    assert choices.crop_ratio.min() >= 0.7499 and choices.crop_ratio.max() <= 1.3334
    assert set(np.unique(choices.quarters)) == {0, 1, 2, 3}
    quality = choices.jpeg[choices.jpeg >= 0]
    assert quality.min() == 0 and quality.max() == 100
    text, emoji = choices.overlay[:, 0], choices.overlay[:, 1]
    assert text[:, 0].min() >= 0.1 and text[:, 0].max() <= 0.3
    assert text[:, 1].min() >= 0.1 and text[:, 1].max() <= 1
    assert emoji[:, 0].min() >= 0.1 and emoji[:, 0].max() <= 0.5
    assert emoji[:, 1].min() >= 0.7 and emoji[:, 1].max() <= 1


def test_sets_are_cumulative() -> None:
    assert list(RECIPES.values()) == [SIMCLR, STRONG_BLUR, ADVANCED, ADVANCED_MIXUP]
    assert SIMCLR.blur_sigma == (0.1, 2.0)
    assert SIMCLR.with_changes({"blur_sigma": (1.0, 5.0)}) == STRONG_BLUR
    changes = {"quarter_turn": 0.05, "rotation": 0.05, "text": 0.1, "emoji": 0.2, "jpeg": 0.2}
    assert STRONG_BLUR.with_changes(changes) == ADVANCED
    assert ADVANCED.with_changes({"mixup": 0.025, "cutmix": 0.025}) == ADVANCED_MIXUP


def test_one_probability_changes_nothing_else() -> None:
    plain, more = (draw(r, 100, generator(1, 2)) for r in (ADVANCED, ADVANCED_MIXUP))
    assert np.array_equal(plain.colour, more.colour)
    assert np.array_equal(plain.text, more.text)
    assert np.array_equal(plain.crop_area, more.crop_area)


def test_draws_follow_seed_and_step() -> None:
    first = draw(ADVANCED, 50, generator(3, 4))
    assert np.array_equal(first.colour, draw(ADVANCED, 50, generator(3, 4)).colour)
    for seed, step in ((3, 5), (4, 4)):
        assert not np.array_equal(first.colour, draw(ADVANCED, 50, generator(seed, step)).colour)


def test_overrides_take_lists_and_refuse_unknown_names() -> None:
    assert SIMCLR.with_changes({"crop_area": [0.5, 1.0]}).crop_area == (0.5, 1.0)
    with pytest.raises(ValueError, match="crop_aera"):
        SIMCLR.with_changes({"crop_aera": 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("jpeg", 2),
        ("jpeg", "often"),
        ("flip", -0.1),
        ("emoji", float("nan")),
        ("crop_area", [1.0, 0.5]),
        ("crop_area", 0.5),
        ("crop_area", [0.1, 0.5, 1.0]),
        ("crop_ratio", [0.0, 1.0]),
        ("jpeg_quality", [0, 400]),
        ("jpeg_quality", [0.5, 90.5]),
        ("pixelize_cells", [0, 8]),
        ("noise_sigma", [0.1, 2.0]),
        ("canvas_zoom", [0.5, 2.0]),
        ("mix_alpha", 0),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"recipe\.{field}="):
        SIMCLR.with_changes({field: value})


def test_a_view_is_mixed_once() -> None:
    with pytest.raises(ValueError, match=r"mixup \+ cutmix \+ paste = 1\.2"):
        SIMCLR.with_changes({"mixup": 0.6, "cutmix": 0.4, "paste": 0.2})


def test_what_the_paper_has_not_is_off_in_its_sets() -> None:
    for recipe in RECIPES.values():
        assert (recipe.crop, recipe.noise, recipe.pixelize, recipe.paste) == (1, 0, 0, 0)
        assert (recipe.untouched, recipe.canvas, recipe.scribble, recipe.filter) == (0, 0, 0, 0)
    drawn = draw_pairs(ADVANCED_MIXUP, COUNT // 2, generator(0, 0))
    assert not drawn.whole.any() and not drawn.noise_sigma.any() and not drawn.cells.any()
    assert not drawn.zoom.any() and (drawn.filter == -1).all() and (drawn.scribble == -1).all()


def test_probabilities_of_what_the_paper_has_not() -> None:
    changes = {"crop": 0.7, "noise": 0.2, "pixelize": 0.1, "canvas": 0.25, "filter": 0.15}
    changes |= {"scribble": 0.05, "distort": 0.1}
    drawn = draw(ADVANCED_MIXUP.with_changes(changes), COUNT, generator(0, 0))
    for happened, probability in (
        (drawn.whole, 0.3),
        (drawn.noise_sigma, 0.2),
        (drawn.cells, 0.1),
        (drawn.zoom[:, 0], 0.25),
        (drawn.filter + 1, 0.15),
        (drawn.scribble + 1, 0.05),
        (drawn.distort[:, 0] + 1, 0.1),
        (drawn.distort[:, 1] + 1, 0.1),
    ):
        spread = (probability * (1 - probability) / COUNT) ** 0.5
        assert abs(np.count_nonzero(happened) / COUNT - probability) < 5 * spread
    sigmas, cells = drawn.noise_sigma[drawn.noise_sigma > 0], drawn.cells[drawn.cells > 0]
    assert sigmas.min() >= 0.05 and sigmas.max() <= 0.4
    assert (cells.min(), cells.max()) == (12, 64)
    zoom = drawn.zoom[drawn.zoom[:, 0] > 0]
    assert zoom.min() == 1 and zoom.max() <= 1.8
    bands = (zoom == 1).sum(axis=1)
    assert set(bands) == {0, 1} and bands.mean() == pytest.approx(0.5, abs=0.02)
    for plain in (0, 1):  # black, white
        assert (drawn.ground == plain).all(axis=1).mean() == pytest.approx(1 / 3, abs=0.02)
    assert set(drawn.filter) == {-1, *range(len(FILTERS))}


def test_only_views_that_are_not_mixed_are_composed_and_most_of_them_whole() -> None:
    recipe = ADVANCED_MIXUP.with_changes({"compose": 0.5, "paste": 0.35})
    drawn = draw(recipe, COUNT, generator(0, 0))
    composed = drawn.compose >= 0
    assert not composed[drawn.mix != NO_MIX].any()
    assert composed[drawn.mix == NO_MIX].mean() == pytest.approx(0.5, abs=0.02)
    assert drawn.whole[composed].mean() == pytest.approx(WHOLE_WHEN_COMPOSED, abs=0.02)
    assert not drawn.whole[~composed].any()


def test_a_view_keeps_at_most_so_many_of_the_edits_it_drew() -> None:
    often = {"rotation": 0.5, "noise": 0.5, "compose": 0.3, "paste": 0.3, "distort": 0.4}
    recipe = ADVANCED_MIXUP.with_changes(often)
    free = draw(recipe, 6000, generator(0, 0))
    limited = draw(recipe.with_changes({"most_edits": 3}), 6000, generator(0, 0))
    counts = {}
    for name, choices in (("free", free), ("limited", limited)):
        drawn = [
            (getattr(choices, edit) != off).reshape(len(choices), -1).any(axis=1)
            for edit, off in COUNTED.items()
        ]
        counts[name] = np.sum(drawn, axis=0)
    combined = (free.mix != NO_MIX) | (free.compose >= 0)
    allowed = 3 - COMBINED * combined
    assert (counts["free"] > allowed).mean() > 0.5
    np.testing.assert_array_equal(counts["limited"], np.minimum(counts["free"], allowed))
    for name in ("flip", "mix", "compose", "partner"):  # never left out
        np.testing.assert_array_equal(getattr(limited, name), getattr(free, name))
    kept = limited.angle != 0
    np.testing.assert_array_equal(limited.angle[kept], free.angle[kept])


def test_a_limit_that_no_view_reaches_changes_nothing() -> None:
    recipe = ADVANCED_MIXUP.with_changes({"compose": 0.3, "distort": 0.4})
    free = draw(recipe, 500, generator(0, 0))
    limited = draw(recipe.with_changes({"most_edits": 100}), 500, generator(0, 0))
    for field in fields(Choices):
        np.testing.assert_array_equal(getattr(limited, field.name), getattr(free, field.name))


def test_first_views_are_left_untouched_and_second_views_are_not() -> None:
    pairs = COUNT // 2
    edited = ADVANCED_MIXUP.with_changes({"rotation": 1.0, "mixup": 1.0, "cutmix": 0.0})
    drawn = draw_pairs(edited.with_changes({"untouched": 0.4}), pairs, generator(0, 0))
    untouched = drawn.angle == 0
    assert untouched[:pairs].mean() == pytest.approx(0.4, abs=5 * (0.24 / pairs) ** 0.5)
    assert not untouched[pairs:].any()
    left, nothing = drawn.take(np.flatnonzero(untouched)), draw(NOTHING, 1, generator(0, 0))
    for name in ("flip", "quarters", "colour", "grayscale", "blur_sigma", "text", "emoji", "mix"):
        assert (getattr(left, name) == getattr(nothing, name)).all(), name
    assert left.whole.all() and (left.jpeg == -1).all()
    # Those that are edited are edited as without it.
    plain, rows = draw_pairs(edited, pairs, generator(0, 0)), np.flatnonzero(~untouched)
    for field in fields(Choices):
        expected = getattr(plain.take(rows), field.name)
        assert np.array_equal(getattr(drawn.take(rows), field.name), expected)


def test_the_exact_jitter_changes_no_other_choice() -> None:
    plain = draw(ADVANCED_MIXUP, COUNT, generator(0, 0))
    exact = draw(ADVANCED_MIXUP.with_changes({"exact_jitter": 0.3}), COUNT, generator(0, 0))
    assert not plain.exact_jitter.any()
    assert exact.exact_jitter.mean() == pytest.approx(0.3, abs=5 * (0.21 / COUNT) ** 0.5)
    for field in fields(Choices):
        if field.name != "exact_jitter":
            assert np.array_equal(getattr(plain, field.name), getattr(exact, field.name))
    everywhere = draw(ADVANCED_MIXUP.with_changes({"exact_jitter": 1}), COUNT, generator(0, 0))
    assert everywhere.exact_jitter.all()
