"""Real processes: fully sharded, tensor parallel, both and replicated, saved and loaded over 1 to 4 ranks."""

from pathlib import Path

import pytest
from parallel_kit import launch

FOUR = "plain,fsdp,fsdp-columns,tp,hsdp,fsdp+tp,ddp+tp"


@pytest.mark.long
def test_two_ranks(tmp_path):
    """Two ranks: fully sharded, tensor parallel and replicated, each into each, and on with training."""
    launch(tmp_path, 2, "plain,fsdp,tp", "plain,fsdp,tp")


@pytest.mark.long
def test_every_layout_to_every_layout(tmp_path):
    """Seven layouts over four ranks, each into each; then the same checkpoints on three, two and one rank and back."""
    launch(tmp_path, 4, FOUR, FOUR)
    launch(tmp_path, 3, "fsdp", "plain,fsdp,tp")
    launch(tmp_path, 2, "fsdp+tp", "fsdp,tp,hsdp")
    launch(tmp_path, 1, "plain", "plain,fsdp")
    launch(tmp_path, 4, "", "fsdp,hsdp,fsdp+tp")


@pytest.mark.long
@pytest.mark.parametrize("mode", ["original", "flat", "mesh"])
def test_the_first_generation_of_fsdp(tmp_path, mode):
    """FSDP1 modules are refused with what to give instead; that is saved in shards and brings training back."""
    launch(tmp_path, 2, mode, script=Path(__file__).with_name("fsdp1_kit.py"))
