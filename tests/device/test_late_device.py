"""The device of these tests is as late as CUDA allows: what nobody waits for has not happened."""

import torch
from on_device import on_device

UNSEEN = 0xD5
FREED = 0xC3


def pattern(tensor, byte):
    return set(bytes(tensor.view(torch.uint8).numpy())) == {byte}


@on_device
def test_a_reader_that_does_not_wait_sees_a_pattern():
    """A copy to the host with non_blocking=True has arrived once somebody waits, and no earlier."""
    source = torch.arange(100.0, device="late")
    target = torch.zeros(100)
    target.copy_(source, non_blocking=True)
    source.add_(1)
    assert pattern(target, UNSEEN)
    torch.late.synchronize()
    assert torch.equal(target, torch.arange(100.0))


@on_device
def test_a_side_stream_copies_when_somebody_waits():
    """A copy on another stream reads what stands there when it is needed, unless the streams wait for each other."""
    source, target = torch.zeros(64, device="late"), torch.empty(64)
    side = torch.late.Stream()
    side.wait_stream(torch.late.current_stream())
    with torch.late.stream(side):
        target.copy_(source, non_blocking=True)
    source.add_(1)
    side.synchronize()
    assert torch.equal(target, torch.ones(64))
    with torch.late.stream(side):
        target.copy_(source, non_blocking=True)
    torch.late.current_stream().wait_stream(side)
    source.add_(1)
    side.synchronize()
    assert torch.equal(target, torch.ones(64))


@on_device
def test_freed_memory_is_used_again_unless_a_stream_is_recorded():
    """A copy of a tensor that was freed meanwhile shows other bytes; `record_stream` keeps them."""
    for recorded in (False, True):
        source, target = torch.ones(64, device="late"), torch.empty(64)
        side = torch.late.Stream()
        with torch.late.stream(side):
            if recorded:
                source.record_stream(side)
            target.copy_(source, non_blocking=True)
        del source
        torch.ones(1, device="late").add_(1)
        side.synchronize()
        assert torch.equal(target, torch.ones(64)) if recorded else pattern(target, FREED)


@on_device
def test_waits_are_counted():
    """A read of a value, a blocking copy and a synchronisation count, for the thread that waits; work does not."""
    value = torch.ones(3, device="late")
    before = torch.late.num_waits()
    value.mul_(2).sum()
    torch.empty(3, pin_memory=True).copy_(value, non_blocking=True)
    assert torch.late.num_waits() == before
    value.sum().item()
    value.cpu()
    torch.late.synchronize()
    assert torch.late.num_waits() == before + 3


@on_device
def test_two_devices_and_their_generators():
    """Each device has its memory, its streams and its generator, whose numbers repeat."""
    assert torch.late.device_count() == 2
    torch.manual_seed(1)
    state = torch.late.get_rng_state_all()
    first = [torch.rand(4, device=f"late:{number}") for number in range(2)]
    assert first[1].device == torch.device("late", 1)
    assert not torch.equal(first[0].cpu(), first[1].cpu())
    torch.late.set_rng_state_all(state)
    again = [torch.rand(4, device=f"late:{number}") for number in range(2)]
    assert all(torch.equal(left.cpu(), right.cpu()) for left, right in zip(first, again, strict=True))


@on_device
def test_memory_has_an_end():
    """Above its limit the device raises torch's error for it."""
    torch.late.set_limit(torch.late.allocated() + 1000)
    try:
        torch.empty(2000, dtype=torch.uint8, device="late")
    except torch.OutOfMemoryError:
        return
    finally:
        torch.late.set_limit(1 << 60)
    raise AssertionError("no error")
