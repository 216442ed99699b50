"""What a checkpoint directory is. No torch, no threads.

codec (typed JSON), digest (chunk digests), tensor_file (safetensors), index (tensors -> bytes), manifest, commit.
May import `storage` and `errors` only.
"""
