"""Load a saved repository without the package, and print what the model writes.

    python modeling_gqa/training/sample.py runs/quickstart/final "import os"

Only the code inside the repository is used: this process cannot import the installed package.
"""

import argparse
import sys
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", help="folder or Hub name")
    parser.add_argument("prompt", nargs="?", default="")
    arguments = parser.parse_args()

    # An import of the package now fails, wherever it is installed.
    sys.modules["modeling_gqa"] = None  # type: ignore[assignment]
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    tokenizer = AutoTokenizer.from_pretrained(arguments.repository, trust_remote_code=True)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.repository, trust_remote_code=True)
    if not type(model).__module__.startswith("transformers_modules."):
        sys.exit(f"error: {type(model).__module__} was loaded in place of the repository's own code")
    inputs = tokenizer(arguments.prompt or tokenizer.bos_token or tokenizer.eos_token, return_tensors="pt")
    set_seed(0)
    tokens = model.generate(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=True,
        temperature=0.7,
        top_k=50,
        max_new_tokens=120,
    )
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
