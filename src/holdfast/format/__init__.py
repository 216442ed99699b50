"""What a checkpoint directory is. No torch, no threads.

codec (typed JSON), digest (chunk digests), layout (safetensors headers), index (tensors -> bytes), manifest, commit.
May import `storage` and `errors` only.
"""
