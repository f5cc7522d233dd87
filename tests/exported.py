"""What `transformers` makes of exported folders, in a Python that cannot import `lex_pretrain`.

`python -I exported.py FOLDER REQUEST OUTPUT` loads every folder inside FOLDER, feeds it what the JSON file REQUEST says
and saves what it found to OUTPUT.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The project may be installed here; an import of it must fail as where it is not.
sys.modules["lex_pretrain"] = None  # type: ignore[assignment]

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402


def load(folder: Path, **settings: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **settings)


def examine(folder: Path, work: Path, request: dict[str, Any]) -> dict[str, Any]:
    model, causal = load(folder), load(folder, attention_mode="causal")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    tokens, texts = torch.tensor(request["tokens"]), request["texts"]
    prompts = tokenizer(request["prompts"], padding=True, return_tensors="pt")
    longest = prompts.input_ids.shape[1]
    greedy = {**prompts, "max_new_tokens": request["max_new_tokens"], "do_sample": False}
    written = model.generate(**greedy, return_dict_in_generate=True)
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
    saved_tokenizer = AutoTokenizer.from_pretrained(work, trust_remote_code=True)
    with torch.inference_mode():
        return {
            "logits": {"blockwise": model(tokens).logits, "causal": causal(tokens).logits},
            "last_logits": model(tokens, logits_to_keep=1).logits,
            "padded_logits": model(**prompts).logits,
            "num_padding": (prompts.attention_mask == 0).sum(dim=1).tolist(),
            "loss": float(model(tokens, labels=tokens).loss),
            "written": tokenizer.batch_decode(written.sequences[:, longest:]),
            "without_cache": torch.equal(model.generate(**greedy, use_cache=False), written.sequences),
            "num_cached_tokens": (written.get("cache") or written.past_key_values).layers[0].num_tokens,
            "ids": [tokenizer.encode(text) for text in texts],
            "decoded": [tokenizer.decode(tokenizer.encode(text)) for text in texts],
            "saved_logits": load(work)(tokens).logits,
            "saved_ids": [saved_tokenizer.encode(text) for text in texts],
            "faults": [
                fault(lambda: model(tokens, torch.ones(tokens.shape[0], tokens.shape[1] - 1))),
                fault(lambda: model(tokens, tokens != tokens[0, 3])),
                fault(lambda: model(tokens, torch.ones_like(tokens), cache=model.decoder.make_cache([2, 0]))),
                fault(lambda: load(folder, attention_mode="all")),
            ],
        }


def fault(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    folder, request_file, output = map(Path, sys.argv[1:])
    request = json.loads(request_file.read_text())
    torch.save(
        {one.name: examine(one, output.parent / f"saved-{one.name}", request) for one in sorted(folder.iterdir())},
        output,
    )
