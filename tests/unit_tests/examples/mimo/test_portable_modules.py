"""A module leaves a MIMO checkpoint for stock GPT and comes in from one, bit for bit.

The checkpoints of stock GPT are those of Megatron's own loop, model and optimizer in the patched
package. The released wheel cannot start that loop without a GPU; the format it writes is the same.
"""

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.unit_tests.helpers.distributed import RankPool
from tests.unit_tests.helpers.mimo_runs import Run, train_mimo, train_stock_gpt
from tools.checkpoint.__main__ import main

pytestmark = pytest.mark.tier1

Pools = Callable[[int], RankPool]
# Attention dropout draws; the hidden one too, but a MIMO model has none after its embeddings.
TEXT = ("--mock-text-only", "--hidden-dropout", "0")
TP_2 = ("--module", "language:tp=2")
SHARDED = ("--bf16", "--use-distributed-optimizer")
RESHARDABLE = (*SHARDED, "--dist-ckpt-optim-fully-reshardable")
EXPERTS = ("--num-experts", "4", "--moe-token-dispatcher-type", "alltoall")
RUNS = {
    "fp32": TP_2,
    "bf16": (*TP_2, "--bf16"),
    "buckets": (*TP_2, *SHARDED),
    "reshardable": (*TP_2, *RESHARDABLE),
    "experts": (
        *("--module", "language:dp=2,ep=2", "--swiglu", "--disable-bias-linear"),
        *(*EXPERTS, *RESHARDABLE),
    ),
}
SWIGLU = ("--bf16", "--swiglu")
"""Its weights are saved in two parts each."""
GPT = (*TP_2, *TEXT, *SWIGLU)
STILL = ("--train-iters", "1", "--lr", "0", "--min-lr", "0")
"""One iteration that leaves the weights alone."""


def refusal(arguments: Sequence[str]) -> str:
    """What a MIMO run says when it stops. Runs on every rank."""
    from examples.mimo.training.hetero.load_module import ModuleLoadError

    with pytest.raises(ModuleLoadError) as error:
        train_mimo(arguments)
    return str(error.value)


def printed(arguments: Sequence[str]) -> tuple[Run, str]:
    """Train, and return what the rank printed as well. Runs on every rank."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        run = train_mimo(arguments)
    return run, output.getvalue()


@pytest.fixture(scope='module')
def gpt(rank_pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of stock GPT at TP 2, trained for two iterations."""
    path = tmp_path_factory.mktemp('gpt')
    rank_pool(2).run(train_stock_gpt, (*GPT, "--train-iters", "2", "--save", str(path)))
    return path


@pytest.fixture(scope='module')
def mimo(rank_pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MIMO checkpoint of two modules on one rank each, trained for two iterations."""
    path = tmp_path_factory.mktemp('mimo')
    modules = ("--module", "vision", "--module", "language", "--bf16")
    rank_pool(2).run(train_mimo, (*modules, "--train-iters", "2", "--save", str(path)))
    return path


def same_weights(first: Path, second: Path, module: str) -> bool:
    """Whether two checkpoints have the same weights of a module, bit for bit."""
    return main(["diff", str(first), str(second), "--module", module, "--weights"]) == 0


@pytest.mark.parametrize("kind", RUNS)
def test_stock_gpt_goes_on(kind: str, rank_pool: Pools, tmp_path: Path) -> None:
    """Stock GPT resumes from an extracted language module where the MIMO run would, dropout on."""
    schedule = (*RUNS[kind], *TEXT, "--train-iters", "4")
    saved = ("--save", str(tmp_path / "mimo"), "--exit-interval", "2")
    rank_pool(2).run(train_mimo, (*schedule, *saved))
    whole = rank_pool(2).run(train_mimo, schedule)
    source, target = str(tmp_path / "mimo"), str(tmp_path / "gpt")
    assert main(["extract", source, "--module", "language", "--output", target]) == 0
    assert main(["verify", target]) == 0
    assert main(["diff", source, target, "--module", "language"]) == 0
    resumed = rank_pool(2).run(train_stock_gpt, (*schedule, "--load", target))
    for run, reference in zip(resumed, whole, strict=True):
        assert len(run.losses) == len(reference.losses) // 2 > 0
        assert run.losses == reference.losses[len(run.losses) :]
        assert (run.weights, run.optimizer) == (reference.weights, reference.optimizer)


def test_language_starts_from_stock_gpt(rank_pool: Pools, gpt: Path) -> None:
    """A MIMO run with --load-module trains as stock GPT does that finetunes from its checkpoint."""
    arguments = (*GPT, "--train-iters", "3", "--use-distributed-optimizer")
    finetune = ("--load", str(gpt), "--finetune")
    stock = rank_pool(2).run(train_stock_gpt, (*arguments, *finetune))
    runs = rank_pool(2).run(printed, (*arguments, "--load-module", f"language={gpt}"))
    assert [run.losses for run, _ in runs] == [run.losses for run in stock]
    assert [run.weights for run, _ in runs] == [run.weights for run in stock]
    assert [run.optimizer for run, _ in runs] == [run.optimizer for run in stock]
    said = runs[0][1]
    assert f"--load-module language={gpt} (iteration 2)\n  found: 16\n" in said
    assert "    decoder.layers.mlp.linear_fc1.weight\n" in said
    assert "missing, left as initialized: 0\n" in said
    assert "but not in the model: 0\n" in said
    assert "--load-module" not in runs[1][1]


def test_any_parallel_size(rank_pool: Pools, gpt: Path, tmp_path: Path) -> None:
    """Weights saved at TP 2 start a language module at PP 2, beside an encoder on its own rank."""
    modules = ("--module", "vision", "--module", "language:pp=2", *SWIGLU, *STILL)
    arguments = ("--load-module", f"language={gpt}", "--save", str(tmp_path))
    rank_pool(3).run(train_mimo, (*modules, *arguments))
    assert same_weights(gpt, tmp_path, "language")


@pytest.mark.parametrize("is_extracted", [False, True], ids=["whole", "extracted"])
def test_encoder_starts_from_its_own(
    is_extracted: bool, rank_pool: Pools, mimo: Path, tmp_path: Path
) -> None:
    """An encoder at TP 2 starts from a MIMO checkpoint, or from what was extracted of it."""
    source = mimo
    if is_extracted:
        source = tmp_path / "vision"
        assert main(["extract", str(mimo), "--module", "vision", "--output", str(source)]) == 0
        assert same_weights(mimo, source, "vision")
    modules = ("--module", "vision:tp=2", "--module", "language", "--bf16", *STILL, "--seed", "8")
    saved = tmp_path / "saved"
    arguments = ("--load-module", f"vision={source}", "--save", str(saved))
    rank_pool(3).run(train_mimo, (*modules, *arguments))
    assert same_weights(mimo, saved, "vision")
    assert not same_weights(mimo, saved, "language")


def test_resume_wins(rank_pool: Pools, mimo: Path, gpt: Path) -> None:
    """Where --load finds a checkpoint, --load-module changes nothing and one line says so."""
    modules = ("--module", "vision", "--module", "language", "--bf16", "--train-iters", "3")
    arguments = (*modules, "--load", str(mimo), "--override-opt-param-scheduler")
    plain = rank_pool(2).run(train_mimo, arguments)
    runs = rank_pool(2).run(printed, (*arguments, "--load-module", f"language={gpt}"))
    assert [run for run, _ in runs] == plain
    lines = [line for line in runs[0][1].splitlines() if "--load-module" in line]
    assert lines == [f"--load-module has no effect: weights come from the checkpoint in {mimo}"]


REFUSED = {
    "other width": (("--hidden-size", "64"), "the model has other sizes than the checkpoint"),
    "more layers": (
        ("--num-layers", "4"),
        "self_attention.linear_qkv.weight is [2, 96, 32] there, [4, 96, 32]",
    ),
    "missing": (
        ("--untie-embeddings-and-output-weights",),
        "the checkpoint lacks output_layer.weight; --load-module-allow-missing language.PART",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_every_rank(case: str, rank_pool: Pools, gpt: Path) -> None:
    """What does not fit is refused with one text on every rank, also those of other modules."""
    more, message = REFUSED[case]
    modules = ("--module", "vision", *TP_2, *SWIGLU, *STILL)
    texts = rank_pool(3).run(refusal, (*modules, *more, "--load-module", f"language={gpt}"))
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"--load-module language={gpt}: ")
    assert message in texts[0]


def test_missing_where_allowed(rank_pool: Pools, gpt: Path) -> None:
    """A part that may be missing starts as without the checkpoint, and is listed."""
    more = ("--untie-embeddings-and-output-weights", "--make-vocab-size-divisible-by", "96")
    source = ("--load-module", f"language={gpt}")
    allowed = ("--load-module-allow-missing", "language.output_layer")
    (_, said), *_ = rank_pool(2).run(printed, (*GPT, *STILL, *more, *source, *allowed))
    assert "embedding.word_embeddings.weight: 128 rows in the checkpoint, 192 here: rows" in said
    assert "missing, left as initialized: 1\n    output_layer.weight\n" in said


def test_damaged_or_absent(rank_pool: Pools, gpt: Path, tmp_path: Path) -> None:
    """A path without a checkpoint, and a shard that was cut off, are named on every rank."""
    damaged = Path(shutil.copytree(gpt, tmp_path / "damaged"))
    shard = damaged / "iter_0000002" / "__0_0.distcp"
    os.truncate(shard, shard.stat().st_size - 1)
    for path, message in ((tmp_path, "is no checkpoint"), (damaged, "is damaged: __0_0.distcp: ")):
        texts = rank_pool(2).run(refusal, (*GPT, *STILL, "--load-module", f"language={path}"))
        assert len(set(texts)) == 1
        assert message in texts[0]
