"""Trainers that own the loop: one or two lines, their own checkpoints, and a warning where they clip as well."""

import csv
import os
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from carryclip import Component, Gated, Norm
from carryclip.diagnosis import CarryClipWarning
from carryclip.integrations.loggers import NAMES, log_to, scalars
from carryclip.torch import UClip
from ranks import running
from seam import ledger

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::carryclip.diagnosis.CarryClipWarning"),
    pytest.mark.filterwarnings("ignore:.*(often trains far worse|gradients wait about)"),
]
STEPS = 12


class Numbers(Dataset):
    """Inputs and targets by number; now and then there is a large one."""

    def __len__(self):
        return 4 * STEPS

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        scale = 30.0 if index // 4 % 5 == 2 else 1.0
        return scale * torch.randn(6, generator=generator), torch.randn(1, generator=generator)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))


def by_hand(region, carry, lr=0.05):
    """What every trainer must come to."""
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
    UClip(optimizer, region, carry)
    for inputs, targets in DataLoader(Numbers(), batch_size=4):
        optimizer.zero_grad()
        (module(inputs) - targets).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in module.parameters()]


def reports(caught):
    """Warnings of ours, but for those that say what a hasty carry does to AdamW."""
    said = [str(each.message) for each in caught if each.category is CarryClipWarning]
    return [each for each in said if "often trains far worse" not in each and "gradients wait about" not in each]


def check_reported(caught, remedy):
    """One warning that names the remedy, or none."""
    said = reports(caught)
    assert len(said) == (remedy is not None)
    assert all("clips" in each and remedy in each for each in said)


def test_looking_at_the_callers_keeps_nothing_of_theirs():
    """A frame that was looked into would hold the first batch until the training is over."""
    from carryclip.torch._foreign import owners

    source = """
def fit(self, owners, weakref):
    batch = set()
    found, seen = list(owners()), weakref.ref(batch)
    del batch
    return found, seen()
"""
    names = {"__name__": "lightning.made_up"}
    exec(source, names)
    assert names["fit"]("trainer", owners, weakref) == (["trainer"], None)


# ---------------------------------------------------------------------- loggers


def test_names_say_where_in_the_step_a_number_is_taken():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    clipper = UClip(optimizer, Norm(1.0), carry=True)
    assert set(scalars(clipper.metrics())) == {"uclip/clip/skipped_steps", "uclip/carry/dropped_norm"}
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    found = scalars(clipper.metrics(), "mine")
    assert set(found) == {f"mine/{name}" for name in NAMES.values()}
    assert set(NAMES) == set(clipper.metrics())
    assert found["mine/before_clip/gradient_norm"] == 5.0
    assert found["mine/after_clip/update_norm"] == pytest.approx(1.0)
    assert found["mine/carry/norm"] == pytest.approx(4.0)


def test_tensorboard_gets_the_curves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    clipper = UClip(optimizer, Norm(1.0), carry=True, metrics_every=1)
    with SummaryWriter(tmp_path) as writer:
        for step in range(3):
            weight.grad = torch.tensor([3.0, 4.0])
            optimizer.step()
            log_to(writer, clipper, step)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {f"uclip/{name}" for name in NAMES.values()}
    carries = [event.value for event in events.Scalars("uclip/carry/norm")]
    assert carries == pytest.approx([4.0, 8.0, 12.0])


# ---------------------------------------------------------------------- arguments

BAD_ARGUMENTS = [
    ((1.0,), {}, TypeError, r"A bare number does not say what to clip: write Norm\(1\.0\)"),
    ((Norm,), {}, TypeError, "Norm is the class"),
    ((Norm(1.0), "gated"), {}, TypeError, "Unknown carry policy 'gated'"),
    ((Norm(1.0),), {"nonfinite": "ignore"}, ValueError, "nonfinite must be 'skip', 'zero'"),
    ((Norm(1.0),), {"metrics_every": -1}, ValueError, "metrics_every must be a whole number"),
    ((Norm(1.0),), {"metric_every": 1}, TypeError, "UClipCallback: got an unexpected.*'metric_every'; the options of"),
    ((Norm(1.0),), {"compile": "yes"}, ValueError, "compile must be True"),
    ((Norm(1.0),), {"carry_dtype": "float16"}, ValueError, "carry_dtype must be None"),
]


@pytest.mark.parametrize(("arguments", "options", "error", "message"), BAD_ARGUMENTS)
def test_callbacks_check_their_arguments_when_they_are_made(tmp_path, arguments, options, error, message):
    from carryclip.integrations import lightning, transformers

    trainer = hf_trainer(tmp_path)
    callbacks = list(trainer.callback_handler.callbacks)
    for make in (
        lightning.UClipCallback,
        transformers.UClipCallback,
        lambda *a, **b: transformers.attach(trainer, *a, **b),
    ):
        with pytest.raises(error, match=message):
            make(*arguments, **options)
    assert trainer.callback_handler.callbacks == callbacks


def test_attach_says_what_it_needs():
    from carryclip.integrations.transformers import attach

    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"attach needs the Trainer, got SGD.*UClip\(optimizer, Norm\(1\.0\)\)"):
        attach(optimizer, Norm(1.0), carry=True)


# ---------------------------------------------------------------------- Lightning


def lightning_fit(
    folder, callback, epochs=2, checkpoint=None, clip=None, precision="32-true", logger=False, region=None, devices=1
):
    """With a callback, or with a clipper that the module itself attaches."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, index):
            return (self.net(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            if region is not None:
                UClip(optimizer, region, carry=True)
            return optimizer

    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=devices,
        strategy="auto" if devices == 1 else "ddp",
        callbacks=[callback] if callback is not None else [],
        default_root_dir=folder,
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=5,
        gradient_clip_val=clip,
        precision=precision,
    )
    module, data = Module(), Numbers()
    sampler = DistributedSampler(data, shuffle=False) if devices > 1 else None  # Lightning's own would shuffle
    trainer.fit(module, DataLoader(data, batch_size=4, sampler=sampler), ckpt_path=checkpoint)
    return trainer, [p.detach() for p in module.parameters()]


def test_lightning_does_what_a_loop_does(tmp_path):
    from carryclip.integrations.lightning import UClipCallback

    trainer, params = lightning_fit(tmp_path, UClipCallback(Norm(0.3), Gated()), epochs=1)
    torch.testing.assert_close(params, by_hand(Norm(0.3), Gated()), rtol=0, atol=0)
    assert trainer.callback_metrics["uclip/before_clip/gradient_norm"] > 0


@pytest.mark.parametrize("region", [Norm(0.3), Component(0.05)], ids=repr)
def test_lightning_resumes_bit_equal(tmp_path, region):
    from carryclip.integrations.lightning import UClipCallback

    trainer, _ = lightning_fit(tmp_path, UClipCallback(region, Gated()), epochs=1)
    path = trainer.checkpoint_callback.best_model_path
    callback = UClipCallback(region, Gated())
    _, resumed = lightning_fit(tmp_path, callback, epochs=2, checkpoint=path)
    _, whole = lightning_fit(tmp_path, UClipCallback(region, Gated()), epochs=2)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    assert ledger(callback.clippers[0]).steps == 2 * STEPS


@pytest.mark.parametrize("form", ["callback", "own"])
@pytest.mark.parametrize("clip", [1.0, None])
def test_lightning_that_clips_too_is_reported_once(tmp_path, form, clip):
    from carryclip.integrations.lightning import UClipCallback

    callback = UClipCallback(Norm(0.3), carry=True) if form == "callback" else None
    own = None if form == "callback" else Norm(0.3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lightning_fit(tmp_path, callback, epochs=1, clip=clip, region=own)
    check_reported(caught, "Trainer(gradient_clip_val=None)" if clip else None)


def test_lightning_logs_through_its_own_logger(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    from carryclip.integrations.lightning import UClipCallback

    logger = CSVLogger(tmp_path)
    lightning_fit(tmp_path, UClipCallback(Norm(0.3), Gated(), metrics_every=1), logger=logger)
    logger.save()
    assert len(logged(tmp_path, "uclip/carry/norm")) == 2 * STEPS // 5


def logged(folder, name):
    """What Lightning has written under a name."""
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        return [row[name] for row in csv.DictReader(file) if row[name]]


def test_lightning_logs_a_measurement_once(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    from carryclip.integrations.lightning import UClipCallback

    logger = CSVLogger(tmp_path)
    # Measured at the 1st, 11th and 22nd of 24 steps, and logged every 5 steps: the last is told of by none.
    lightning_fit(tmp_path, UClipCallback(Norm(0.3), carry=True, metrics_every=11), logger=logger)
    logger.save()
    assert len(logged(tmp_path, "uclip/before_clip/gradient_norm")) == 2
    assert len(logged(tmp_path, "uclip/clip/skipped_steps")) == 4


def test_lightning_logs_figures_of_the_step_that_it_logs(tmp_path):
    from lightning.pytorch.loggers import Logger

    from carryclip.integrations.lightning import UClipCallback

    class Seen(Logger):
        name, version, lines = "seen", 0, []

        def log_hyperparams(self, *args, **kwargs):
            pass

        def log_metrics(self, metrics, step=None):
            if "uclip/before_clip/gradient_norm" in metrics:
                self.lines.append((step, callback.clippers[0].metrics().step))

    callback = UClipCallback(Norm(0.3), carry=True, metrics_every=5)
    lightning_fit(tmp_path, callback, logger=Seen())
    assert Seen.lines == [(4, 4), (9, 9), (14, 14), (19, 19)]  # Lightning counts from 0 as well


# ---------------------------------------------------------------------- Hugging Face


def hf_trainer(folder, steps=STEPS, report=(), max_grad_norm=0.0, callbacks=None, dtype=torch.float32):
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.net = net()
            self.post_init()

        def _init_weights(self, module):
            pass

        def forward(self, inputs, targets):
            scores = self.net(inputs.to(self.net[0].weight.dtype))
            return {"loss": (scores - targets).float().square().mean(), "scores": scores}

    def collate(rows):
        return {"inputs": torch.stack([row[0] for row in rows]), "targets": torch.stack([row[1] for row in rows])}

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=max_grad_norm,
        logging_steps=3,
        save_steps=STEPS // 2,
        report_to=list(report) or "none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    model = Model(PretrainedConfig()).to(dtype)
    with torch.no_grad():
        for p, q in zip(model.net.parameters(), net().parameters(), strict=True):
            p.copy_(q)
    sampler = torch.utils.data.SequentialSampler

    class Ordered(Trainer):
        def _get_train_sampler(self, *args):
            return sampler(self.train_dataset)

    return Ordered(model=model, args=arguments, train_dataset=Numbers(), data_collator=collate, callbacks=callbacks)


def weights(trainer):
    return [p.detach() for p in trainer.model.net.parameters()]


@pytest.mark.pairwise(together=1)
@pytest.mark.parametrize("form", ["attach", "callback"])
@pytest.mark.parametrize("region", [Norm(0.3), Component(0.05)], ids=repr)
def test_the_hf_trainer_clips_and_resumes_bit_equal(tmp_path, region, form):
    from carryclip.integrations.transformers import UClipCallback, attach

    def make():
        if form == "attach":
            trainer = hf_trainer(tmp_path)
            return trainer, attach(trainer, region, Gated(), metrics_every=1)
        callback = UClipCallback(region, Gated(), metrics_every=1)
        return hf_trainer(tmp_path, callbacks=[callback]), callback

    whole, callback = make()
    whole.train()
    clipped = [line["uclip/after_clip/update_norm"] for line in whole.state.log_history if "loss" in line]
    assert len(clipped) == STEPS // 3
    assert ledger(callback.clipper).steps == STEPS
    resumed, again = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    assert ledger(again.clipper).steps == STEPS
    bare = hf_trainer(tmp_path)
    bare.train()
    assert any(not torch.equal(p, q) for p, q in zip(weights(bare), weights(whole), strict=True))


def test_the_hf_trainer_logs_a_measurement_once(tmp_path):
    from carryclip.integrations.transformers import attach

    trainer = hf_trainer(tmp_path)
    attach(
        trainer, Norm(0.3), carry=True, metrics_every=5
    )  # the 1st, 5th and 10th step of 12; logged after the 3rd, 6th, 9th and 12th
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert ["uclip/before_clip/gradient_norm" in line for line in lines] == [True, True, False, True]
    assert all("uclip/clip/skipped_steps" in line for line in lines)


def test_the_hf_trainer_logs_figures_of_the_step_that_it_logs(tmp_path):
    from carryclip.integrations.transformers import attach

    trainer = hf_trainer(tmp_path, max_grad_norm=1e9)  # too large to clip anything, and yet the trainer logs the norm
    attach(trainer, Norm(0.3), carry=True, metrics_every=3)
    with pytest.warns(CarryClipWarning, match="max_grad_norm=1e\\+09"):
        trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    for line in lines:
        assert line["uclip/before_clip/gradient_norm"] == pytest.approx(line["grad_norm"], rel=1e-5)


def test_a_trainer_that_clips_is_reported_once_though_its_norms_show_it_too(tmp_path):
    from carryclip.integrations.transformers import attach

    trainer = hf_trainer(tmp_path, max_grad_norm=0.01)
    attach(trainer, Norm(0.01), carry=True, metrics_every=1)
    with pytest.warns(CarryClipWarning) as caught:
        trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["uclip/before_clip/gradient_norm"] for line in lines] == pytest.approx([0.01] * len(lines), rel=1e-4)
    assert ["max_grad_norm=0.01" in said for said in reports(caught)] == [True]


def test_a_model_in_bfloat16_resumes_bit_equal_if_attached(tmp_path):
    from carryclip.integrations.transformers import attach

    runs = []
    for checkpoint in (None, str(tmp_path / f"checkpoint-{STEPS // 2}")):
        trainer = hf_trainer(tmp_path, dtype=torch.bfloat16)
        callback = attach(trainer, Component(0.05), carry=True)
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append([*weights(trainer), *(callback.clipper.carry(p) for p in trainer.model.net.parameters())])
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)
    assert runs[0][-1].dtype == torch.float32


@pytest.mark.parametrize("form", ["attach", "callback", "own"])
@pytest.mark.parametrize("limit", [1.0, 0.0])
def test_the_hf_trainers_default_clipping_is_reported_once(tmp_path, form, limit):
    from carryclip.integrations.transformers import UClipCallback, attach

    callbacks = [UClipCallback(Norm(0.3), carry=True)] if form == "callback" else None
    trainer = hf_trainer(tmp_path, max_grad_norm=limit, callbacks=callbacks)
    if form == "attach":
        attach(trainer, Norm(0.3), carry=True)
    elif form == "own":
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.05)
        UClip(trainer.optimizer, Norm(0.3), carry=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    check_reported(caught, "TrainingArguments(max_grad_norm=0.0)" if limit else None)


def test_the_hf_trainer_reports_to_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from carryclip.integrations.transformers import attach

    trainer = hf_trainer(tmp_path, report=["tensorboard"])
    attach(trainer, Norm(0.3), carry=True)
    trainer.train()
    files = list(tmp_path.rglob("events.out.tfevents.*"))
    tags = {tag for file in files for tag in EventAccumulator(str(file)).Reload().Tags()["scalars"]}
    assert any("uclip/before_clip/gradient_norm" in tag for tag in tags)


# ---------------------------------------------------------------------- Accelerate


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_saves_and_resumes_the_carry(tmp_path, when):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def train(steps, load=None, save=None):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        module = net()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
        clipper = UClip(optimizer, Norm(0.3), Gated()) if when == "before" else None
        module, optimizer, data = accelerator.prepare(module, optimizer, DataLoader(Numbers(), batch_size=4))
        clipper = clipper or UClip(optimizer, Norm(0.3), Gated())
        if load:
            accelerator.load_state(load)
        for index, (inputs, targets) in enumerate(data):
            if index in steps:
                with accelerator.accumulate(module):
                    accelerator.backward((module(inputs) - targets).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
        if save:
            accelerator.save_state(save)
        return [p.detach() for p in module.parameters()], ledger(clipper).steps

    whole = train(range(STEPS))
    half = train(range(STEPS // 2), save=str(tmp_path / "half"))
    rest = train(range(STEPS // 2, STEPS), load=str(tmp_path / "half"))
    assert (half[1], rest[1], whole[1]) == (STEPS // 4, STEPS // 2, STEPS // 2)
    torch.testing.assert_close(rest[0], whole[0], rtol=0, atol=0)


def test_accelerate_in_bfloat16_does_what_autocast_does():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    module, wanted = net(), net()
    optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=0.05) for each in (module, wanted))
    for each in (optimizer, plain):
        UClip(each, Norm(0.3), Gated())
    module, optimizer = accelerator.prepare(module, optimizer)
    for inputs, targets in DataLoader(Numbers(), batch_size=4):
        optimizer.zero_grad()
        accelerator.backward((module(inputs) - targets).square().mean())
        optimizer.step()
        plain.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            scores = wanted(inputs)
        (scores.float() - targets).square().mean().backward()
        plain.step()
    for p, q in zip(module.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


# ---------------------------------------------------------------------- two processes


@pytest.fixture(scope="module")
def ranks():
    """Processes of our own: trainers keep what they once found out about theirs."""
    with running() as made:
        yield made


def settle_in(rank):
    """What torchrun tells each process."""
    warnings.simplefilter("ignore")
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511}
    os.environ.update({name: str(value) for name, value in place.items()})


def lightning_on_two(rank, folder):
    from carryclip.integrations.lightning import UClipCallback

    def fit(epochs, checkpoint=None):
        callback = UClipCallback(Norm(0.3), Gated())
        trainer, params = lightning_fit(folder, callback, epochs, checkpoint, devices=2)
        (clipper,) = callback.clippers
        runs.append([x.clone() for x in (*params, *map(clipper.carry, range(4)))])
        return trainer.checkpoint_callback.best_model_path, ledger(clipper).steps

    settle_in(rank)
    runs = []
    path, _ = fit(1)
    fit(2, path)
    _, steps = fit(2)
    return runs, steps


def test_lightning_clips_and_resumes_on_two(ranks, tmp_path):
    results = ranks.run(lightning_on_two, str(tmp_path))
    for (once, resumed, whole), steps in results:
        torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
        torch.testing.assert_close(whole, results[0][0][2], rtol=0, atol=0)
        torch.testing.assert_close(once[:4], by_two_hands(Norm(0.3), Gated()), rtol=0, atol=0)
        assert steps == STEPS


def by_two_hands(region, carry):
    """One process that averages what two get of the data: every other example."""
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    UClip(optimizer, region, carry)
    for inputs, targets in DataLoader(Numbers(), batch_size=8):
        losses = [(module(inputs[k::2].contiguous()) - targets[k::2]).square().mean() for k in range(2)]
        parts = [torch.autograd.grad(loss, list(module.parameters())) for loss in losses]
        for p, one, other in zip(module.parameters(), *parts, strict=True):
            p.grad = (one + other) / 2
        optimizer.step()
    return [p.detach() for p in module.parameters()]


def hf_on_two(rank, folder):
    from carryclip.integrations.transformers import attach

    settle_in(rank)
    runs = []
    for checkpoint in (None, f"{folder}/checkpoint-{STEPS // 2}"):
        trainer = hf_trainer(folder)
        callback = attach(trainer, Norm(0.3), Gated())
        trainer.train(resume_from_checkpoint=checkpoint)
        carries = [callback.clipper.carry(p) for p in trainer.model.net.parameters()]
        runs.append([x.clone() for x in (*weights(trainer), *carries)])
    return runs, trainer.args.world_size


def test_the_hf_trainer_clips_and_resumes_on_two(ranks, tmp_path):
    results = ranks.run(hf_on_two, str(tmp_path))
    for (whole, resumed), size in results:
        assert size == 2
        torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
        torch.testing.assert_close(whole, results[0][0][0], rtol=0, atol=0)
        assert any(carry.any() for carry in whole[4:])


def accelerate_on_two(rank):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    settle_in(rank)
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    UClip(optimizer, Norm(0.3), Gated())
    module, optimizer = accelerator.prepare(module, optimizer)
    for inputs, targets in DataLoader(Numbers(), batch_size=8):
        optimizer.zero_grad()
        accelerator.backward((module(inputs[rank::2].contiguous()) - targets[rank::2]).square().mean())
        optimizer.step()
    return [p.detach().clone() for p in module.parameters()], accelerator.num_processes


def test_accelerate_clips_on_two(ranks):
    for params, size in ranks.run(accelerate_on_two):
        assert size == 2
        torch.testing.assert_close(params, by_two_hands(Norm(0.3), Gated()), rtol=0, atol=0)
