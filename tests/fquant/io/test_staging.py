"""Tests of fquant.io.staging: bytes that come through buffers, in the order of files, copies and waits."""

import io

import pytest
import torch

from fquant.io import staging


class Slow:
    """A file that gives a few bytes at a time, as a pipe or a signal may cause."""

    def __init__(self, data, most):
        self.file, self.most = io.BytesIO(data), most

    def readinto(self, view):
        return self.file.readinto(view[: self.most])


class Device:
    """A device that copies late: a buffer may not be read to before its copy was waited for."""

    def __init__(self):
        self.order, self.copies = [], 0

    def recorded(self):
        number, self.copies = self.copies, self.copies + 1
        self.order.append(f"copy {number}")
        return lambda: self.order.append(f"wait {number}")


@pytest.mark.parametrize("most", [1, 5, 1000])
@pytest.mark.parametrize("size", [1, 3, 8, 100])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 31, 32, 33])
def test_every_byte_arrives_and_no_buffer_is_read_to_early(n, size, most):
    data, device = bytes(range(n)), Device()
    out, buffers = torch.zeros(n, dtype=torch.uint8), [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    lacking = staging.through(buffers, out, Slow(data, most), device.recorded)  # type: ignore[arg-type]
    assert (lacking, bytes(out.tolist())) == (0, data)
    pieces = max(1, -(-n // size))
    wanted = [each for i in range(pieces) for each in ([f"wait {i - 2}"] if i > 1 else []) + [f"copy {i}"]]
    assert device.order == wanted


@pytest.mark.parametrize("n, held", [(1, 0), (9, 8), (9, 3), (32, 31), (32, 16), (32, 0)])
def test_what_a_short_file_lacks_is_counted(n, held):
    out, buffers = torch.zeros(n, dtype=torch.uint8), [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    assert staging.through(buffers, out, io.BytesIO(bytes(held)), Device().recorded) == n - held
    assert staging.fill(torch.empty(n, dtype=torch.uint8), io.BytesIO(bytes(held))) == n - held


@pytest.mark.parametrize("shape, dtype", [((), torch.float64), ((2, 0), torch.int8), ((3, 5), torch.bfloat16)])
def test_a_tensor_of_any_shape_is_filled(device, shape, dtype):
    given = torch.arange(15).reshape(-1)[: max(0, torch.empty(shape).numel())].reshape(shape).to(dtype)
    out = torch.empty(shape, dtype=dtype, device=device)
    assert staging.fill(out, io.BytesIO(given.view(-1).view(torch.uint8).numpy().tobytes())) == 0
    assert out.device == torch.empty(0, device=device).device and torch.equal(out.cpu(), given)


def test_a_tensor_larger_than_the_buffers(device, monkeypatch):
    monkeypatch.setattr(staging, "PIECE", 1000)
    given = torch.arange(5003, dtype=torch.int32)
    out = torch.empty(5003, dtype=torch.int32, device=device)
    assert staging.fill(out, io.BytesIO(given.numpy().tobytes())) == 0
    assert torch.equal(out.cpu(), given)
