"""CPU tensors, which otherwise take the torch path, go to the Triton kernels here."""

import pytest

from sscd_vec.kernels import objective


@pytest.fixture(autouse=True)
def triton_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "runs_on_triton", lambda x: True)
