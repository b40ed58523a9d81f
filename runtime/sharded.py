"""Checkpoints of sharded models: a directory to which every rank writes its part.

torch.distributed.checkpoint (DCP) saves the tensors, a tied weight once, and state.pt holds the rest, with a checksum
of every file. Unlike DCP, this module reads metadata without running code."""

import functools
import pickle
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.tensor import DTensor, Replicate, zeros

from runtime.files import checksum, load_pt, one_line, put_in_place, save_pt
from runtime.optimizer_state import map_tensors

NO_FILE = -1  # the checksum of a rank that has no tensors to write


def model_tensors(model):
    """Return a model's weights and buffers, a tied one once, as a dict with keys model.NAME."""
    further_names = tied(model)
    return {f'model.{name}': tensor for name, tensor in model.state_dict().items() if name not in further_names}


def tied(model):
    """Return {further name: first name} of tied parameters."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != name}


def write(world, path, model, state, shards):
    """Write the checkpoint `state`, with the weights of `model` and the DTensors `shards` by name, as the directory
    `path`. It has another name until state.pt, its last file, is complete. Collective: every rank must call it. OSError
    if the file system fails, on rank 0 at least."""
    partial = path.with_suffix('.partial')
    if world.is_master:
        shutil.rmtree(partial, ignore_errors=True)
    writer = dcp.FileSystemWriter(partial)
    writer.storage_meta = lambda: None  # It would hold a Path, which `MetadataUnpickler` rejects.
    try:
        dcp.save(model_tensors(model) | shards, storage_writer=writer)
    except CheckpointException as error:  # the same on all ranks
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f'rank {rank}: {getattr(cause, "strerror", None) or one_line(cause)}') from None
    shard = partial / f'__{world.rank}_0.distcp'
    crc = checksum(shard) if shard.exists() else NO_FILE
    sums = world.gather(torch.tensor([crc], device=world.device)).flatten()
    if world.is_master:
        files = {f'__{rank}_0.distcp': crc for rank, crc in enumerate(sums.tolist()) if crc != NO_FILE}
        files['.metadata'] = checksum(partial / '.metadata')
        save_pt(partial / 'state.pt', dict(state, files=files, tied=tied(model)))
        put_in_place(path.parent)


def read_state(path, weights=True, check=True):
    """Read the state of the directory `path`: its model as full tensors, or not if `weights` is False; its optimizer
    without tensors, see `read_optimizer`. With `check`, raise ValueError if a file does not fit its checksum."""
    state = load_pt(path / 'state.pt')
    files, also = state.pop('files'), state.pop('tied')
    for name, crc in files.items():
        if check and (not (path / name).is_file() or checksum(path / name) != crc):
            raise ValueError(f'{name} does not fit its checksum')
    model = {}
    if weights:
        entries = ShardReader(path).read_metadata().state_dict_metadata
        model = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()
                 if name.startswith('model.')}
        load_into(model, path)
        model = {name.removeprefix('model.'): tensor for name, tensor in model.items()}
        model |= {name: model[first] for name, first in also.items()}
    return dict(state, model=model)


def read_optimizer(path, saved, params):
    """Return the optimizer's state_dict `saved`, with tensors from the directory `path` in place of those on the device
    'meta': DTensors if the parameter in `params`, {key: parameter}, is one, else full tensors."""
    targets = {}

    def target(like, name, tensor):
        if tensor.is_meta and isinstance(like, DTensor):
            placements = like.placements if tensor.shape == like.shape else [Replicate()] * like.device_mesh.ndim
            targets[name] = zeros(tensor.shape, dtype=tensor.dtype, device_mesh=like.device_mesh, placements=placements)
        elif tensor.is_meta:  # load_state_dict moves it to the optimizer's device.
            targets[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return targets.get(name, tensor)

    state = {key: map_tensors(entries, functools.partial(target, params.get(key)), f'optimizer.state.{key}')
             for key, entries in saved['state'].items()}
    load_into(targets, path)
    return dict(saved, state=state)


def load_into(tensors, path):
    """Fill `tensors`, by their names, from the directory `path`, without communication."""
    with warnings.catch_warnings():  # DCP warns that there is no process group.
        warnings.simplefilter('ignore')
        dcp.load(tensors, storage_reader=ShardReader(path), no_dist=True)


class ShardReader(dcp.FileSystemReader):
    """A safe reader, which loads only tensors and their metadata."""

    def read_metadata(self, *args, **kwargs):
        """Read the metadata, or raise UnpicklingError if it describes anything but tensors."""
        with (Path(self.path) / '.metadata').open('rb') as f:
            metadata = MetadataUnpickler(f).load()
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler of the metadata of tensors, and of nothing else."""

    ALLOWED = {
        'torch.distributed.checkpoint.metadata': {
            'Metadata', 'MetadataIndex', 'TensorStorageMetadata', 'TensorProperties', 'ChunkStorageMetadata',
            'StorageMeta', '_MEM_FORMAT_ENCODING'},
        'torch.distributed.checkpoint.filesystem': {'_StorageInfo'},
        'torch.serialization': {'_get_layout'},
        'torch': {'Size', *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    }

    def find_class(self, module, name):
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f'{module}.{name}')
        return super().find_class(module, name)
