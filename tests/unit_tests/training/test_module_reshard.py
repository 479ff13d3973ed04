"""What a layout cannot load of a checkpoint, rule by rule. Pure logic, without ranks."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.training import module_reshard
from megatron.training.module_reshard import (
    ReshardError,
    check_contents,
    check_layout,
    check_stock_optimizer,
    optimizer_arguments,
)

pytestmark = pytest.mark.tier0

FRESH = "pass --no-load-optim to start with a fresh optimizer."
VISION = {'vision': {}, 'language': {'offset': 1}}
DEFAULT = {'distrib_optim_sharding_type': 'dp_reshardable'}
FULLY = {'distrib_optim_sharding_type': 'fully_reshardable'}


def arguments(layout: dict[str, dict[str, int]] | None, **others: Any) -> SimpleNamespace:
    """Arguments of a run, with the distributed optimizer in half precision unless told."""
    common = {
        'finetune': False,
        'no_load_optim': False,
        'use_distributed_optimizer': True,
        'optimizer': 'adam',
        'bf16': True,
        'fp16': False,
        'vocab_size': 128,
        'num_experts': None,
    }
    return SimpleNamespace(module_layout=layout, **{**common, **others})


def optimizer(*trained: str) -> SimpleNamespace:
    """A MIMO optimizer on a rank where these modules train."""
    infos = {name: SimpleNamespace(optimizer=name in trained or None) for name in (*VISION, 'x')}
    return SimpleNamespace(module_infos=infos)


def told(
    saved: SimpleNamespace,
    present: SimpleNamespace,
    metadata: dict[str, Any] | None = DEFAULT,
    trained: tuple[str, ...] = ('vision', 'language'),
) -> str:
    """Sentence with which a checkpoint is refused, or nothing."""
    try:
        check_layout(present, saved, 'run/iter_1', metadata, optimizer(*trained), False)
    except ReshardError as error:
        return str(error)
    return ""


def grids(**vision: int) -> dict[str, dict[str, int]]:
    """A layout with a vision module of these sizes."""
    return {'vision': vision, 'language': {'offset': 2}}


@pytest.mark.parametrize(
    ('size', 'experts'), [('tp', None), ('pp', None), ('ep', 4), ('etp', 4)], ids=str
)
def test_default_format_is_tied_to(size: str, experts: int | None) -> None:
    """The default format follows no change of the sizes that split a model; the size is named."""
    saved = arguments(grids(**{size: 2}), num_experts=experts)
    present = arguments(grids(**{size: 1}), num_experts=experts)
    assert told(saved, present).startswith(f"--module vision: {size} 2 -> 1 since run/iter_1 was")
    assert "--dist-ckpt-optim-fully-reshardable" in told(saved, present)
    assert FRESH in told(saved, present)
    assert told(saved, present, FULLY) == ""
    assert told(saved, present, trained=('language',)) == ""


@pytest.mark.parametrize('size', ['dp', 'cp', 'offset', 'ep'])
def test_default_format_follows(size: str) -> None:
    """It follows data and context parallelism, other ranks, and EP of a model without experts."""
    assert told(arguments(grids(**{size: 2})), arguments(grids(**{size: 1}))) == ""


def test_all_changed_sizes_are_named() -> None:
    """Two changes of a module are one sentence."""
    text = told(arguments(grids(tp=2, pp=2)), arguments(grids(tp=1, pp=4)))
    assert text.startswith("--module vision: tp 2 -> 1, pp 2 -> 4 since")


@pytest.mark.parametrize('flag', ['finetune', 'no_load_optim'])
def test_without_optimizer_any_layout_loads(flag: str) -> None:
    """What the optimizer is tied to does not matter where it is not loaded."""
    saved = arguments(grids(tp=2), no_save_optim=True)
    assert told(saved, arguments(grids(tp=1), **{flag: True}), None) == ""


def test_a_module_that_the_checkpoint_lacks() -> None:
    """A new module is refused, naming what there is and what starts without it."""
    saved = arguments({'language': {}})
    text = told(saved, arguments(VISION))
    assert text == (
        "--module vision: run/iter_1 has no such module, it was saved with language; leave it out, "
        "or start anew with --load-module language=run in place of --load."
    )
    assert told(arguments(None), arguments(VISION)) == text


def test_a_module_that_would_be_lost() -> None:
    """A module of the checkpoint is not dropped in silence, but where one starts anew."""
    present = {'language': {}}
    text = told(arguments(VISION), arguments(present), FULLY)
    assert text.startswith("module vision of run/iter_1 has no --module here and would be lost;")
    assert told(arguments(VISION), arguments(present, finetune=True)) == ""


@pytest.mark.parametrize(
    ('saved', 'present', 'says'),
    [
        ({'no_save_optim': True}, {}, "run/iter_1 was saved with --no-save-optim; " + FRESH),
        (
            {'use_distributed_optimizer': False},
            {},
            "run/iter_1 was saved without --use-distributed-optimizer, this run is with "
            "--use-distributed-optimizer; " + FRESH,
        ),
        (
            {'optimizer': 'sgd'},
            {},
            "run/iter_1 was saved with --optimizer sgd, this run is with --optimizer adam; "
            + FRESH,
        ),
        (
            {'use_distributed_optimizer': False, 'bf16': False},
            {'use_distributed_optimizer': False},
            "run/iter_1 was saved without --bf16, this run is with --bf16; " + FRESH,
        ),
        ({'bf16': False}, {}, ""),
        ({'vocab_size': 96}, {}, "module language: --vocab-size was 96 and is 128."),
        ({'vocab_size': None}, {}, ""),
    ],
)
def test_what_the_flags_say(saved: dict[str, Any], present: dict[str, Any], says: str) -> None:
    """Each way in which the optimizer of a checkpoint is another one is told by its flag."""
    assert told(arguments(VISION, **saved), arguments(VISION, **present)) == says


@pytest.mark.parametrize('kind', ['fully_sharded_model_space', 'dp_zero_gather_scatter', None])
def test_retired_formats(kind: str | None) -> None:
    """A format that nothing reads any more is named."""
    metadata = {'distrib_optim_sharding_type': kind} if kind else None
    text = told(arguments(VISION), arguments(VISION), metadata)
    assert f"holds its optimizer state as {kind}, a retired format;" in text


def test_a_stock_run_is_left_alone() -> None:
    """A stock run is not asked, but its own refusal names the flag that helps."""
    check_layout(arguments(None), arguments(VISION), 'run', None, None, False)
    check_contents(arguments(None), 'nowhere', {})
    assert optimizer_arguments(arguments(None), 'nowhere', DEFAULT)['metadata'] is DEFAULT
    check_stock_optimizer(arguments(None), (1, 2), (1, 2), DEFAULT, "(TP, PP) mismatch")
    check_stock_optimizer(arguments(None), (1, 2), (2, 1), FULLY, "(TP, PP) mismatch")
    check_stock_optimizer(arguments(VISION), (1, 2), (2, 1), DEFAULT, "(TP, PP) mismatch")
    with pytest.raises(RuntimeError, match="mismatch: .*--dist-ckpt-optim-fully-reshardable"):
        check_stock_optimizer(arguments(None), (1, 2), (2, 1), DEFAULT, "(TP, PP) mismatch")


def tensor(key: str, *shape: int, flexible: bool = False) -> ShardedTensor:
    """A tensor that one rank holds whole."""
    data = torch.zeros(shape)
    return ShardedTensor.from_rank_offsets(key, data, allow_shape_mismatch=flexible)


class Contents:
    """A checkpoint in a folder of this test that consists of its metadata file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        """Make the folder, which is written ``run/iter_1``."""
        monkeypatch.chdir(folder)
        Path('run/iter_1').mkdir(parents=True)

    def save(self, **saved: tuple[int, ...] | None) -> None:
        """Hold these keys (``__`` for dots, ``!`` for slashes) with shapes, or objects."""
        entries = {
            key.replace('__', '.').replace('!', '/'): (
                BytesStorageMetadata()
                if shape is None
                else TensorStorageMetadata(TensorProperties(), torch.Size(shape), [])
            )
            for key, shape in saved.items()
        }
        with Path('run/iter_1/.metadata').open('wb') as file:
            pickle.dump(Metadata(entries), file)
        module_reshard._read_sizes.cache_clear()  # as the clock of files is coarse

    def told(self, state: dict[str, Any], **saved: tuple[int, ...] | None) -> str:
        """Sentence with which these keys are refused, or nothing."""
        self.save(**saved)
        try:
            check_contents(arguments(VISION), 'run/iter_1', state)
        except ReshardError as error:
            return str(error)
        return ""


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Contents:
    """A checkpoint to fill."""
    return Contents(monkeypatch, tmp_path)


def test_another_shape_is_named_with_both(contents: Contents) -> None:
    """A tensor of another shape is refused; padding of the vocabulary is not."""
    state = {'model': {'a': tensor('language_model.w', 4, 2), 'b': 7}}
    assert contents.told(state, language_model__w=(4, 2)) == ""
    assert contents.told(state, language_model__w=(3, 2)) == (
        "module language: language_model.w is (3, 2) in run/iter_1, but (4, 2) in this run; the "
        "model's sizes must be those that were saved."
    )
    state = {'model': [tensor('language_model.w', 4, 2, flexible=True)]}
    assert contents.told(state, language_model__w=(3, 2)) == ""
    assert "has no language_model.w;" in contents.told(state, language_model__v=(3, 2))


def test_what_factories_make_is_asked_for(contents: Contents) -> None:
    """The tensors behind a factory are looked for, not the factory."""

    def build(key: str, data: torch.Tensor, *_: Any) -> list[ShardedTensor]:
        return [tensor(f'{key}.{half}', *data.shape) for half in ('up', 'gate')]

    state = {'m': ShardedTensorFactory('mimo.vision.w', torch.zeros(2), build, torch.cat)}
    both = {'mimo__vision__w__up': (2,), 'mimo__vision__w__gate': (2,)}
    assert contents.told(state, **both) == ""
    assert contents.told(state, mimo__vision__w__up=(2,)) == (
        "module vision: run/iter_1 has no mimo.vision.w.gate; the module did not train, or not as "
        f"here, when it was saved; {FRESH}"
    )


@pytest.mark.parametrize(
    ('key', 'saved', 'remedy'),
    [
        ('vision.rng_state', 'language_model__w', "pass --no-load-rng to go on with fresh"),
        (
            'language_model.w',
            'embedding__w',
            "no MIMO run wrote it; start anew with --load-module language=run in",
        ),
        ('language_model.w', 'language_model__v', "the model must be the one that was saved"),
        ('mimo.vision.w', 'language_model__v', "pass --no-load-optim"),
    ],
)
def test_what_helps_where_something_is_missing(
    contents: Contents, key: str, saved: str, remedy: str
) -> None:
    """Each missing part is told with what goes on without it."""
    state = {'x': ShardedObject(key, None, (1,), (0,)), 'y': ShardedObject(key, None, (2,), (0,))}
    text = contents.told(state, **{saved: (1,)})
    assert f"run/iter_1 has no {key}/shard_0_1 nor 1 more; " in text
    assert remedy in text


def test_saved_optimizers_are_counted(contents: Contents) -> None:
    """A load knows how many optimizers each module had, and the caller's metadata stays."""
    key = 'mimo__{0}__optimizer__mimo__{0}{1}__param_groups!shard_0_1'
    keys = [key.format('vision', ''), key.format('language', ''), key.format('language', '__1')]
    contents.save(**dict.fromkeys(keys))
    metadata = dict(DEFAULT)
    passed = optimizer_arguments(arguments(VISION), 'run/iter_1', metadata)
    assert passed['metadata'] == {**DEFAULT, 'mimo_saved_optimizers': {'vision': 1, 'language': 2}}
    assert metadata == DEFAULT


def test_a_checkpoint_in_memory_is_not_asked() -> None:
    """One without a metadata file, in a node's own memory, is loaded as it always was."""
    check_contents(arguments(VISION), 'nowhere', {'model': tensor('language_model.w', 4)})
    assert optimizer_arguments(arguments(VISION), 'nowhere', DEFAULT)['metadata'] is DEFAULT
