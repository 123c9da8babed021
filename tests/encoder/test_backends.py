import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from sscd_vec.encoder import Encoder, EncoderConfig, SSCDModel, backends, build_model
from sscd_vec.encoder.backends import Bfloat16Error, bfloat16_problem
from sscd_vec.encoder.backends.exported import pieces
from sscd_vec.encoder.backends.fold import fold_batch_norms, fuse_convolutions, inference_copy
from sscd_vec.encoder.backends.native import TorchBackend
from sscd_vec.encoder.preprocess import normalize

CPU = torch.device("cpu")


def make_model(trunk: str = "resnet18", **changes: object) -> SSCDModel:
    """A model whose batch norms do something, as after training."""
    torch.manual_seed(0)
    model = build_model(EncoderConfig(trunk=trunk, dim=32, size=64).replace(**changes)).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.1)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 2.0)  # type: ignore[arg-type]
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
    return model


@pytest.fixture(scope="module")
def model() -> SSCDModel:
    return make_model()


def images(*shape: int) -> torch.Tensor:
    """Noise as normalized input ``(n, 3, h, w)``."""
    return torch.randn(shape[0], 3, *shape[1:], generator=torch.Generator().manual_seed(1))


def pixels(*shape: int, seed: int = 1) -> torch.Tensor:
    """Noise as uint8 ``(n, h, w, 3)``, what a backend takes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (*shape, 3), generator=generator, dtype=torch.uint8)


@torch.inference_mode()
def plain(model: SSCDModel, batch: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What the model itself gives."""
    descriptors: torch.Tensor = model(normalize(batch, model.config))
    return descriptors.numpy()


@pytest.mark.parametrize(
    "trunk",
    ["resnet18", "resnet50", "efficientnet_lite0", "mobilenet_v3_small", "vit_b_32"],
)
def test_torch_backend_equals_the_model(trunk: str) -> None:
    model = make_model(trunk)
    backend = TorchBackend(model, CPU, "float32")
    for shape in ((2, 96, 128), (1, 160, 96)):
        batch = pixels(*shape)
        np.testing.assert_allclose(backend(batch), plain(model, batch), atol=1e-6, rtol=0)


@pytest.mark.parametrize("changes", [{"head": "mlp"}, {"features": "trunk"}, {"gem_p": 1.0}])
def test_heads_and_pooling(changes: dict[str, Any]) -> None:
    model = make_model(**changes)
    batch = pixels(2, 64, 64)
    result = TorchBackend(model, CPU, "float32")(batch)
    np.testing.assert_allclose(result, plain(model, batch), atol=1e-6, rtol=0)


def test_folding_leaves_no_batch_norm_and_the_original_alone(model: SSCDModel) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folded = inference_copy(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert not any(parameter.requires_grad for parameter in folded.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class Awkward(nn.Module):
    """What must not be folded or fused: outputs used twice, modules called twice, broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.twice = nn.Conv2d(8, 8, 1)
        self.last_norm = nn.BatchNorm2d(8)
        self.reflect = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.pooled = nn.Conv2d(8, 8, 1)
        self.relu6 = nn.ReLU6()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.norm(x) + x
        y = self.last_norm(self.twice(self.twice(y)))
        y = torch.relu(y + self.pooled(y.mean((2, 3), keepdim=True)))
        result: torch.Tensor = self.relu6(self.reflect(y))
        return result


def test_only_what_may_be_fused_is() -> None:
    torch.manual_seed(0)
    network = Awkward().eval().requires_grad_(False)
    nn.init.uniform_(network.norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    nn.init.uniform_(network.last_norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    x = images(2, 24, 40)
    wanted = network(x)
    folded = fold_batch_norms(network)
    torch.testing.assert_close(folded(x), wanted, atol=1e-5, rtol=0)
    with torch.inference_mode():
        torch.testing.assert_close(fuse_convolutions(folded)(x), wanted, atol=1e-5, rtol=0)


def test_a_callers_autocast_changes_nothing(model: SSCDModel) -> None:
    encoder = Encoder(model, device="cpu")
    pictures = [np.full((64, 64, 3), 40 * index, np.uint8) for index in range(5)]
    for some in (pictures[:1], pictures):  # in the calling thread, and in those of the cores
        wanted = encoder.encode(some)
        with torch.autocast("cpu", torch.bfloat16):
            np.testing.assert_array_equal(encoder.encode(some), wanted)


@pytest.mark.parametrize("name", ["torch", "openvino", "onnx"])
def test_threads_may_share_a_backend(model: SSCDModel, name: backends.BackendName) -> None:
    run = backends.open_backend(name, model, CPU, "float32")
    batches = [pixels(count, 64, 64, seed=count) for count in (1, 2, 3, 5)]
    wanted = [run(batch) for batch in batches]
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(run, batches * 10))
    for got, expected in zip(found, wanted * 10, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["openvino", "onnx"])
def test_other_backends_agree(model: SSCDModel, name: backends.BackendName) -> None:
    pictures = [
        np.random.default_rng(index).integers(0, 256, (70, 64 + 32 * (index % 3), 3), np.uint8)
        for index in range(7)
    ]
    wanted = Encoder(model, device="cpu").encode(pictures)
    encoder = Encoder(model, backend=name)
    assert encoder.device == CPU
    z = encoder.encode(pictures)
    assert z.dtype == np.float32
    assert float((1 - (z * wanted).sum(1)).max()) < 1e-6
    assert encoder.fingerprint == Encoder(model).fingerprint


def test_onnx_file_has_free_axes(model: SSCDModel, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    Encoder(model, device="cpu").export_onnx(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.onnx"]
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for shape in ((1, 64, 64), (3, 96, 160), (2, 75, 51)):
        x = images(*shape)
        (z,) = session.run(["descriptors"], {"images": x.numpy()})
        with torch.inference_mode():
            wanted = model(x).numpy()
        np.testing.assert_allclose(z, wanted, atol=1e-5)
    assert '"trunk": "resnet18"' in session.get_modelmeta().custom_metadata_map["sscd_vec.config"]


def test_batches_are_cut_into_few_sizes() -> None:
    for count in range(70):
        cuts = pieces(count, streams=2)
        covered = [index for cut in cuts for index in range(cut.start, cut.stop)]
        assert covered == list(range(count))
        assert {cut.stop - cut.start for cut in cuts} <= {1, 2, 4, 8}
    assert len(pieces(32, streams=2)) == 4
    assert len(pieces(2, streams=2)) == 2


def test_missing_package_names_the_extra(model: SSCDModel, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        backends, "find_spec", lambda name: None if name == "openvino" else find_spec(name)
    )
    with pytest.raises(ImportError, match=r"pip install 'sscd-vec\[openvino\]'"):
        Encoder(model, backend="openvino")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "tensorrt"}, "torch | openvino | onnx"),
        ({"precision": "float16"}, "float32 | bfloat16"),
        ({"backend": "onnx", "precision": "bfloat16"}, "no bfloat16"),
        ({"backend": "openvino", "device": "cuda"}, "CPU"),
        ({"backend": "onnx", "device": "mps"}, "cpu or cuda"),
    ],
)
def test_impossible_combinations(model: SSCDModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        Encoder(model, **options)


def test_importing_the_encoder_is_light() -> None:
    code = (
        "import sys, sscd_vec.encoder.encoder; "
        "print([name for name in ('openvino', 'onnx', 'onnxruntime', 'onnxscript', 'rich', "
        "'matplotlib', 'faiss', 'pymilvus') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    assert output == b"[]\n"


# bfloat16


def test_a_killed_probe_is_an_error_not_a_dead_process(
    model: SSCDModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    monkeypatch.setitem(backends._PROBES, "torch", dies)
    bfloat16_problem.cache_clear()
    try:
        with pytest.raises(Bfloat16Error, match=r"killed by SIGILL.*precision='float32'"):
            Encoder(model, device="cpu", precision="bfloat16")
    finally:
        bfloat16_problem.cache_clear()


def test_probe_reports_failures_and_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends._try("pass") is None
    assert "no such thing" in str(backends._try("raise ValueError('no such thing')"))
    calls: list[str] = []
    monkeypatch.setattr(backends, "_try", lambda code: calls.append(code))
    bfloat16_problem.cache_clear()
    try:
        assert bfloat16_problem() is None and bfloat16_problem() is None
        assert len(calls) == 1
    finally:
        bfloat16_problem.cache_clear()


def test_bfloat16_where_it_works(model: SSCDModel) -> None:
    problem = bfloat16_problem()
    if problem is not None:
        pytest.skip(f"bfloat16 does not work here: {problem}")
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    wide, narrow = Encoder(model), Encoder(model, device="cpu", precision="bfloat16")
    z = narrow.encode(picture)
    assert z.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, atol=1e-6)
    assert 0.99 < float((z * wide.encode(picture)).sum()) < 1 - 1e-9
    assert narrow.fingerprint != wide.fingerprint
