"""Hugging Face Trainer: one line after making it. The model is tiny and made from a config; nothing is downloaded.

From a clone: pip install ".[frameworks]"
python examples/hf_trainer.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from carryclip import Norm
from carryclip.integrations.transformers import attach

TEXT = "the carry keeps what the clip cuts off and gives it back to the next gradient . " * 40


def windows(length: int = 32) -> list[dict[str, torch.Tensor]]:
    """The text's bytes in pieces."""
    codes = torch.tensor(list(TEXT.encode()))
    pieces = [codes[start : start + length] for start in range(0, len(codes) - length, length)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=60,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            max_grad_norm=0.0,  # the trainer's own clipping off: 0.0, not None
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=windows())
        attach(trainer, Norm(1.0))  # the line that matters
        trainer.train()
    for line in trainer.state.log_history[:-1]:
        clipped, carry = line["uclip/after_clip/update_norm"], line["uclip/carry/norm"]
        print(f"step {line['step']}: loss {line['loss']}, update {clipped:.3f}, carry {carry:.3f}")


if __name__ == "__main__":
    main()
