"""Formats of other libraries: converts checkpoints from and to them, tensor by tensor.

``export`` (blobs, source) writes safetensors, torch and DCP files from a checkpoint of any number of ranks;
``import_checkpoint`` (from_files, from_shards, gathered) writes a checkpoint from such files; ``dcp_storage`` lets
torch.distributed.checkpoint itself save and load checkpoints of Holdfast. ``diff`` and ``arithmetic`` compare and
average ours. No model code, no accelerator, no pickle but torch's own containers, and those only through allow-lists.
"""
