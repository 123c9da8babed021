"""The Triton engine of the losses: what ``chunked`` does in torch, in the kernels' three rooms."""

from sscd_vec.kernels.infonce import add_contrast_gradient, positives
from sscd_vec.kernels.neighbours import add_pair_gradient, squared_distance
from sscd_vec.kernels.scan import scan

__all__ = ["add_contrast_gradient", "add_pair_gradient", "positives", "scan", "squared_distance"]
