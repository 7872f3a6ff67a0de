"""An image that an engine has seen is encoded by the tower of the policy that it serves.

SGLang keeps what a vision tower computed under the hash of the image alone, also when its caches
are flushed. Logprobs are compared to the last bit: each request runs alone, in the same shapes.
"""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

import trainer_bridge
from tests.engine import controlled_server, vision_models
from tests.engine.harness import EngineProcess, Server
from tests.engine.serving import GREEDY, update, version_of
from tests.engine.vision_models import END, IMAGE, START

# Two engines start, one after the other.
pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

SIDE = 64
"""Pixels. Both families make four tokens of such an image."""
SLOW = "disable_fast_image_processor"
"""SGLang moves images to a GPU for its fast processor, unless its own CPU platform runs."""

Answer = list[tuple[float, int]]
"""Logprob and id of each token."""


def picture(seed: int) -> str:
    """Noise, as the URL of a PNG."""
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (SIDE, SIDE, 3), dtype=torch.uint8, generator=random)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def ask(engine: Server | EngineProcess, image: str) -> Answer:
    """The answer to a prompt with this image, where no prefix is found in SGLang's cache."""
    engine.flush()
    request = {
        "input_ids": [1, 2, START, IMAGE, END, 3, 4],
        "image_data": image,
        "sampling_params": GREEDY,
        "return_logprob": True,
    }
    (reply,) = engine.generate(request)
    assert reply["meta_info"]["cached_tokens"] == 0
    assert reply["meta_info"]["prompt_tokens"] == 6 + 4  # the image's own
    return [(entry[0], entry[1]) for entry in reply["meta_info"]["output_token_logprobs"]]


def check_layers(layers: list[dict[str, Any]], tied: bool) -> None:
    """The tower is BF16, and nothing of the language model but embedding and head."""
    formats = {layer["name"]: layer["format"] for layer in layers}
    bf16 = {name for name, format_ in formats.items() if format_ == "bf16"}
    tower = {name for name in formats if name.startswith("visual.")}
    assert tower
    assert bf16 == tower | {"model.embed_tokens"} | (set() if tied else {"lm_head"})


@pytest.mark.guarantee("one-version", fault="an image that was seen before the update")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", list(vision_models.FAMILIES))
def test_an_image_is_encoded_by_the_new_tower(family: str, tied: bool, tmp_path: Path) -> None:
    start = vision_models.make_checkpoint(family, tmp_path / "start", tied=tied)
    policy = vision_models.with_another_tower(start, tmp_path / "policy", seed=1)
    image, other_image = picture(0), picture(1)
    with EngineProcess(tmp_path / "engine.log", policy, **{SLOW: True}) as fresh:
        wanted = ask(fresh, image)

    keep_embeddings = tmp_path / controlled_server.KEEP_EMBEDDINGS
    with Server(
        tmp_path / "server.log",
        controlled_server.MODULE,
        start,
        f"--{SLOW.replace('_', '-')}",
        environment={controlled_server.CONTROL: str(tmp_path)},
    ) as server:
        layout = server.control({"op": "layout"})
        assert (layout["tied"] is not None) == tied
        check_layers(server.control({"op": "layers"})["layers"], tied)
        old = ask(server, image)
        assert ask(server, other_image) != old  # an answer depends on the image
        assert ask(server, image) == old

        # A control: the tower is the new one, but an embedding of the old one is kept.
        keep_embeddings.touch()
        update(server, policy)
        control = ask(server, image)
        keep_embeddings.unlink()
        assert control == old

        update(server, policy)
        new = ask(server, image)
        print(f"{family}: new and old logprobs are {difference(new, old):.3f} apart")
        assert new == wanted
        assert new != old

        # and back, from a trainer's module, whose names need not be those of the checkpoint
        module = AutoModelForImageTextToText.from_pretrained(start, dtype=torch.bfloat16)
        trainer_bridge.update(module, server, version=version_of(server) + 1)
        assert ask(server, image) == old


def difference(a: Answer, b: Answer) -> float:
    """Largest difference of two logprobs at the same place."""
    return max(abs(x - y) for (x, _), (y, _) in zip(a, b, strict=True))
