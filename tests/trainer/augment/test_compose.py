import numpy as np
import pytest
import torch

from sscd_vec.trainer.augment.compose import backdrop, collage, compose, interface, stack

SIZE = 64


def solid(*levels: float) -> torch.Tensor:
    """Plain images, (n, 3, SIZE, SIZE)."""
    return torch.stack([torch.full((3, SIZE, SIZE), level) for level in levels])


def test_a_composition_follows_its_seed_and_leaves_the_view_alone() -> None:
    image, fillers = torch.rand(3, SIZE, SIZE), torch.rand(5, 3, SIZE, SIZE)
    before = image.clone()
    for seed in range(20):
        composed = compose(image, fillers, seed)
        assert composed.shape == image.shape and composed.dtype == image.dtype
        assert 0 <= composed.min() and composed.max() <= 1 + 1e-6
        assert torch.equal(composed, compose(image, fillers, seed))
        assert (composed - image).abs().mean() > 0.02
    assert torch.equal(image, before)
    assert not torch.equal(compose(image, fillers, 0), compose(image, fillers, 1))


@pytest.mark.parametrize("make", [collage, stack, backdrop, interface])
def test_the_view_fills_a_tenth_to_two_thirds(make: object) -> None:
    """One tone marks the view; nothing else has it."""
    assert callable(make)
    image, fillers = solid(0.7531)[0], solid(0.25, 0.3, 0.35)
    for seed in range(60):
        page = make(image, fillers, np.random.default_rng(seed))
        shown = ((page - 0.7531).abs() < 1e-3).all(dim=0).float().mean()
        blended = make is backdrop  # translucent in a quarter of the cases
        assert shown < 0.72
        assert shown > 0.07 or blended


def test_fillers_fill_the_rest_of_a_collage() -> None:
    image, fillers = solid(1.0)[0], solid(0.2, 0.4, 0.6, 0.8)
    for seed in range(30):
        page = collage(image, fillers, np.random.default_rng(seed))
        tones = set(page[0].numpy().round(3).astype(float).round(3).ravel().tolist())
        assert 1.0 in tones and tones & {0.2, 0.4, 0.6, 0.8}
        assert len(tones - {0.2, 0.4, 0.6, 0.8, 1.0}) <= 1, "gaps have one colour"


def test_one_filler_is_enough() -> None:
    image, filler = torch.rand(3, SIZE, SIZE), torch.rand(1, 3, SIZE, SIZE)
    for seed in range(12):
        assert compose(image, filler, seed).shape == image.shape


def test_every_layout_is_drawn() -> None:
    pages = [compose(solid(1.0)[0], solid(0.0), seed) for seed in range(200)]
    sizes = {int((page.mean(dim=0) > 0.99).sum()) for page in pages}
    assert len(sizes) > 50, "the view's size differs from page to page"
