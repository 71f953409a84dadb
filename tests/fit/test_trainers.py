"""A budget in other people's trainers: they get the same weights, to the bit, and keep their state.

Each recipe is that of docs/any-model.md.
"""

from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn

from megatron_lite import api
from tests.support.foreign_families import qwen3

pytestmark = pytest.mark.usefixtures("two_actions")

QUIET = dict(per_device_train_batch_size=2, use_cpu=True, save_strategy="no", disable_tqdm=True)


def language_model():
    """In eval mode, as `from_pretrained` returns it."""
    torch.manual_seed(1)
    return qwen3().eval()


def rows():
    """Samples, of which the last two are the longest."""
    return [{"input_ids": each, "labels": each} for each in map(torch.arange, (20, 20, 35, 35))]


def weights(model):
    return [each.detach().clone() for each in model.parameters()]


def check(train):
    """train: returns the weights after a few steps, with a budget or without."""
    plain, _ = train(None)
    same, wide = train("1GiB")
    assert set(wide.policies.values()) == {"*:none"}
    budget = int(0.9 * wide.measured)
    others, fit = train(f"{budget}B")
    assert set(fit.policies.values()) != {"*:none"} and fit.measured <= budget
    for one, other, each in zip(plain, same, others, strict=True):
        assert torch.equal(one, other) and torch.equal(one, each)


def trained(trainer, budget):
    """Trains with a budget or without. Returns the weights and the fit."""
    callback = budget and api.MemoryBudgetCallback(budget)  # a late import
    if callback:
        trainer.add_callback(callback)
    trainer.train()
    return weights(trainer.model), callback and callback.fit


class Drawing(torch.utils.data.SequentialSampler):
    """It has a generator of its own."""

    def __iter__(self):
        torch.rand(1, generator=self.generator)
        return super().__iter__()


class Summed:
    """A trainer's loss of its own, as trainers of preferences have, and a log that it keeps itself.
    It gets samples one by one, as trainers that generate do, in some of their steps."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.losses, self.measured = {"train": []}, SimpleNamespace(calls=[])
        self.number = 0

    def training_step(self, model, inputs, num_items_in_batch):
        batch = torch.utils.data.default_collate(inputs)
        inputs.clear()
        if self.number % 3 == 0:
            with torch.no_grad():
                model(input_ids=batch["input_ids"][:, :9])
        self.number += 1
        return super().training_step(model, batch, num_items_in_batch)

    def compute_loss(self, model, inputs, *_, **__):
        assert model.training
        length = inputs["input_ids"].shape[1]
        self.losses["train"].append(length)
        accumulates = any(each.grad is not None for each in model.parameters())
        self.measured.calls.append((length, accumulates))  # stays
        logits = model(input_ids=inputs["input_ids"]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


def test_the_trainer_of_transformers_is_measured_by_its_own_step(tmp_path, capsys):
    pytest.importorskip("accelerate")  # the Trainer needs it

    def train(budget):
        settings = transformers.TrainingArguments(
            str(tmp_path),
            num_train_epochs=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=budget is not None,
            **QUIET,
        )
        trainer = type("SummedTrainer", (Summed, transformers.Trainer), {})(  # a late import too
            language_model(), settings, list, train_dataset=rows()
        )
        sampler = Drawing(rows())
        sampler.generator = torch.Generator()
        # As the samples stand, so the largest batch is the second one.
        trainer._get_train_sampler = lambda *_: sampler
        found, fit = trained(trainer, budget)
        assert trainer.losses == {"train": [20, 35, 20, 35]} and "other shapes" not in str(fit)
        measured = {(35, False), (35, True)} if budget else set()
        assert set(trainer.measured.calls[:-4]) == measured
        assert not any("forward" in vars(each) for each in trainer.model.modules())
        return [*found, torch.rand(1, generator=sampler.generator)], fit

    check(train)
    assert "checkpointing is off" in capsys.readouterr().out


def test_a_budget_outside_of_a_trainer_says_what_to_call():
    with pytest.raises(ValueError, match="maximize: .*per_device_train_batch_size"):
        api.MemoryBudgetCallback("1GiB", maximize="batch")
    with pytest.raises(ValueError, match="call fit_memory_"):
        api.MemoryBudgetCallback("1GiB").on_train_begin(None, None, None)


def test_sft_with_an_adapter_trains_to_the_same_bits(tmp_path):
    """TRL with its default arguments, and a LoRA of peft."""
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    datasets = pytest.importorskip("datasets")

    def train(budget):
        trainer = trl.SFTTrainer(
            language_model(),
            trl.SFTConfig(str(tmp_path), max_steps=2, bf16=False, **QUIET),
            train_dataset=datasets.Dataset.from_list(
                [{"input_ids": one["labels"].tolist()} for one in rows()]
            ),
            peft_config=peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1),
            processing_class=transformers.PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer(WordLevel({"<pad>": 58, "<eos>": 59})),
                pad_token="<pad>", eos_token="<eos>",
            ),
        )  # fmt: skip
        return trained(trainer, budget)

    check(train)


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_lightning_trains_to_the_same_bits(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def training_step(self, batch, number):
            loss = self.model(**batch).loss
            self.log("loss", loss, on_step=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    def train(budget):
        fit = None

        def start(trainer, module, batch, number):
            nonlocal fit
            if budget and not fit:
                module.log = lambda *_, **__: None
                fit = api.fit_memory_(
                    module,
                    budget,
                    step=lambda: [
                        trainer.strategy.training_step(batch, 0).backward() for _ in range(2)
                    ],
                    optimizer=trainer.optimizers[0],
                )
                del module.log

        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False,
            callbacks=lightning.callbacks.LambdaCallback(on_train_batch_start=start),
            default_root_dir=tmp_path,
        )  # fmt: skip
        model = Module()
        model.model = language_model().train()
        trainer.fit(model, torch.utils.data.DataLoader(rows(), 2))
        return weights(model), fit

    check(train)


def test_accelerate_trains_to_the_same_bits():
    accelerate = pytest.importorskip("accelerate")

    def train(budget):
        accelerator, fit = accelerate.Accelerator(cpu=True), None
        plain = language_model().train()
        model, optimizer, loader = accelerator.prepare(
            plain, torch.optim.AdamW(plain.parameters()), torch.utils.data.DataLoader(rows(), 2)
        )

        def run():
            accelerator.backward(model(**batch).loss)

        for batch in loader:  # noqa: B007
            if budget and not fit:
                fit = api.fit_memory_(model, budget, step=run, optimizer=optimizer)
            run()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model), fit

    check(train)
