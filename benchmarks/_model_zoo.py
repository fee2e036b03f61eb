"""The models of `models.py`: code that others wrote, with random weights, as its users run it.

Each entry makes the model and returns one step. Nothing here knows of opgraft. Sizes are those of
released models, with fewer layers where the released one would not leave room for a step of
training, or would take minutes to make. `small` makes the same model in a size for the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[], Any]


class Work(NamedTuple):
    """A model that is ready to run.

    Attributes:
        step: one step of training or inference.
        items: what a step is worth.
        unit: what is counted: tokens, images, nodes, samples.
        modules: what `torch.compile` is to compile.
    """

    step: Step
    items: int
    unit: str
    modules: tuple[nn.Module, ...]


class Entry(NamedTuple):
    """A model by name.

    Attributes:
        name: of the row.
        make: makes it on a device; the second argument asks for a small one.
        source: the library whose code it is.
        compiles: whether it is measured under `torch.compile`, too.
        changed: what differs from what the library's users get unless they ask for it.
    """

    name: str
    make: Callable[[str, bool], Work]
    source: str
    compiles: bool
    changed: str


ZOO: dict[str, Entry] = {}

#: Of models whose configuration drops attention weights in training unless it is told otherwise: no
#: override takes such attention.
WITHOUT_DROPOUT = "no attention dropout"


def entry(
    name: str, source: str, *, compiles: bool = True, changed: str = ""
) -> Callable[[Any], Any]:
    """Add a function that makes a model."""

    def add(make: Callable[[str, bool], Work]) -> Callable[[str, bool], Work]:
        full = f"{name}, {changed}" if changed else name
        ZOO[full] = Entry(full, make, source, compiles, changed)
        return make

    return add


# ------------------------------------------------------------------------------ steps of any model


def _made(make: Callable[[], nn.Module], device: str, dtype: torch.dtype) -> nn.Module:
    """A model whose weights are made where they live, which saves a minute each."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return make()
    finally:
        torch.set_default_dtype(before)


def _autocast(device: str) -> torch.autocast:
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


def _training(
    model: nn.Module, loss: Callable[[], torch.Tensor], device: str, *, autocast: bool
) -> Step:
    """A step of training with AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        if autocast:
            with _autocast(device):
                value = loss()
        else:
            value = loss()
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def _inference(model: nn.Module, run: Callable[[], Any]) -> Step:
    model.eval()

    @torch.no_grad()
    def step() -> Any:
        return run()

    return step


# ------------------------------------------------------------------------------- language models


def _language_model(
    kind: str, device: str, settings: dict[str, Any], *, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**settings)
    config._attn_implementation = "sdpa"
    head = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
    model = getattr(transformers, head.get(kind, f"{kind}ForCausalLM"))
    return _made(lambda: model(config), device, dtype if device == "cuda" else torch.float32)


_LLAMA = dict(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
)
_QWEN3 = dict(
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=14,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)
_GEMMA3 = dict(
    hidden_size=1152,
    intermediate_size=6912,
    num_hidden_layers=26,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    vocab_size=262144,
    sliding_window=512,
)
_QWEN3_MOE = dict(
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=64,
    num_experts_per_tok=8,
    num_hidden_layers=6,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151936,
)
_GPT2 = dict(n_embd=1024, n_layer=24, n_head=16, n_positions=1024)
_SMALL = dict(
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_experts=4,
    num_experts_per_tok=2,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    vocab_size=101,
    n_embd=64,
    n_layer=1,
    n_head=2,
    n_positions=64,
)


def _sized(settings: dict[str, Any], small: bool) -> dict[str, Any]:
    return {key: _SMALL.get(key, value) if small else value for key, value in settings.items()}


def _causal_training(
    kind: str, settings: dict[str, Any], batch: int, length: int, autocast: bool
) -> Callable[[str, bool], Work]:
    def make(device: str, small: bool) -> Work:
        b, n = (2, 16) if small else (batch, length)
        dtype = torch.float32 if autocast else torch.bfloat16
        model = _language_model(kind, device, _sized(settings, small), dtype=dtype)
        tokens = torch.randint(model.config.vocab_size, (b, n), device=device)
        step = _training(
            model, lambda: model(input_ids=tokens, labels=tokens).loss, device, autocast=autocast
        )
        return Work(step, b * n, "tokens", (model,))

    return make


def _causal_prefill(
    kind: str, settings: dict[str, Any], batch: int, length: int
) -> Callable[[str, bool], Work]:
    def make(device: str, small: bool) -> Work:
        b, n = (2, 16) if small else (batch, length)
        model = _language_model(kind, device, _sized(settings, small))
        tokens = torch.randint(model.config.vocab_size, (b, n), device=device)
        run = lambda: model(input_ids=tokens, use_cache=True, logits_to_keep=1)  # noqa: E731
        return Work(_inference(model, run), b * n, "tokens", (model,))

    return make


entry("llama-1.2b train", "transformers")(_causal_training("Llama", _LLAMA, 4, 2048, False))
entry("llama-1.2b prefill", "transformers")(_causal_prefill("Llama", _LLAMA, 4, 4096))
entry("qwen3-1b train", "transformers")(_causal_training("Qwen3", _QWEN3, 4, 2048, False))
entry("qwen3-1b prefill", "transformers")(_causal_prefill("Qwen3", _QWEN3, 4, 4096))
entry("gemma3-1b train", "transformers")(_causal_training("Gemma3Text", _GEMMA3, 4, 1024, False))
entry("gemma3-1b prefill", "transformers")(_causal_prefill("Gemma3Text", _GEMMA3, 4, 4096))
entry("qwen3-moe train", "transformers")(_causal_training("Qwen3Moe", _QWEN3_MOE, 4, 2048, False))
entry("gpt2-medium train", "transformers")(_causal_training("GPT2", _GPT2, 8, 1024, True))
entry("gpt2-medium train", "transformers", changed=WITHOUT_DROPOUT)(
    _causal_training("GPT2", {**_GPT2, "attn_pdrop": 0.0}, 8, 1024, True)
)


def _generate(cache: str) -> Callable[[str, bool], Work]:
    """Sixteen tokens after a prompt, for a batch of eight."""

    def make(device: str, small: bool) -> Work:
        model = _language_model("Llama", device, _sized(_LLAMA, small)).eval()
        batch, length, fresh = (2, 8, 2) if small else (8, 512, 32)
        tokens = torch.randint(model.config.vocab_size, (batch, length), device=device)
        options: dict[str, Any] = dict(
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=fresh,
            min_new_tokens=fresh,
            do_sample=False,
            disable_compile=True,
            pad_token_id=0,
        )
        if cache == "static":
            options["cache_implementation"] = "static"
        step = _inference(model, lambda: model.generate(tokens, **options))
        return Work(step, batch * fresh, "tokens", (model,))

    return make


entry("llama-1.2b generate", "transformers", compiles=False)(_generate("dynamic"))
entry("llama-1.2b generate static", "transformers")(_generate("static"))


def _padding(batch: int, length: int, device: str) -> torch.Tensor:
    """A mask of sequences of a quarter of the length to all of it."""
    lengths = torch.linspace(length // 4, length, batch, device=device).long()
    return (torch.arange(length, device=device) < lengths[:, None]).long()


def _bert(device: str, small: bool, attention_dropout: float = 0.1) -> Work:
    import transformers

    sizes = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16)
    sizes["intermediate_size"] = 4096
    if small:
        sizes = _sized(sizes, small)
    config = transformers.BertConfig(**sizes, attention_probs_dropout_prob=attention_dropout)
    config._attn_implementation = "sdpa"
    model = _made(lambda: transformers.BertForMaskedLM(config), device, torch.float32)
    batch, length = (2, 16) if small else (32, 512)
    tokens = torch.randint(config.vocab_size, (batch, length), device=device)
    mask = _padding(batch, length, device)
    labels = tokens.masked_fill(mask == 0, -100)

    def loss() -> torch.Tensor:
        return model(input_ids=tokens, attention_mask=mask, labels=labels).loss

    return Work(_training(model, loss, device, autocast=True), batch * length, "tokens", (model,))


entry("bert-large train, padded", "transformers")(_bert)
entry("bert-large train, padded", "transformers", changed=WITHOUT_DROPOUT)(
    functools.partial(_bert, attention_dropout=0.0)
)


def _t5(device: str, small: bool, dropout: float = 0.1) -> Work:
    import transformers

    sizes: dict[str, Any] = dict(d_model=768, d_ff=3072, num_layers=12, num_heads=12)
    if small:
        sizes = dict(d_model=32, d_ff=48, num_layers=1, num_heads=2, d_kv=16, vocab_size=101)
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, dropout_rate=dropout)
    config._attn_implementation = "sdpa"
    model = _made(lambda: transformers.T5ForConditionalGeneration(config), device, torch.float32)
    batch, length, out = (2, 16, 8) if small else (32, 512, 128)
    tokens = torch.randint(config.vocab_size, (batch, length), device=device)
    labels = torch.randint(config.vocab_size, (batch, out), device=device)
    mask = _padding(batch, length, device)

    def loss() -> torch.Tensor:
        return model(input_ids=tokens, attention_mask=mask, labels=labels).loss

    step = _training(model, loss, device, autocast=True)
    return Work(step, batch * (length + out), "tokens", (model,))


entry("t5-base train, padded", "transformers")(_t5)
# It has one probability for attention and all else.
entry("t5-base train, padded", "transformers", changed=WITHOUT_DROPOUT)(
    functools.partial(_t5, dropout=0.0)
)


@entry("whisper-small train", "transformers")
def _whisper(device: str, small: bool) -> Work:
    import transformers

    width, layers, heads = (32, 1, 2) if small else (768, 12, 12)
    config = transformers.WhisperConfig(
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
    )
    config._attn_implementation = "sdpa"
    make = functools.partial(transformers.WhisperForConditionalGeneration, config)
    model = _made(make, device, torch.float32)
    batch, out = (1, 8) if small else (16, 128)
    sound = torch.randn(batch, 80, 3000, device=device)
    labels = torch.randint(config.vocab_size, (batch, out), device=device)
    step = _training(
        model, lambda: model(input_features=sound, labels=labels).loss, device, autocast=True
    )
    return Work(step, batch, "samples", (model,))


# ------------------------------------------------------------------------------------ image models


@entry("vit-large train", "transformers")
def _vit(device: str, small: bool) -> Work:
    import transformers

    sizes = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16)
    sizes["intermediate_size"] = 4096
    if small:
        sizes = _sized(sizes, small)
    config = transformers.ViTConfig(**sizes, num_labels=1000)
    config._attn_implementation = "sdpa"
    make = functools.partial(transformers.ViTForImageClassification, config)
    model = _made(make, device, torch.float32)
    batch = 1 if small else 64
    images = torch.randn(batch, 3, 224, 224, device=device)
    labels = torch.randint(1000, (batch,), device=device)

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(pixel_values=images).logits, labels)

    return Work(_training(model, loss, device, autocast=True), batch, "images", (model,))


def _timm(
    name: str,
    batch: int,
    *,
    size: int = 224,
    channels_last: bool = False,
    trains: bool = True,
    fuses_windows: bool = False,
) -> Callable[[str, bool], Work]:
    """A model of timm.

    Args:
        fuses_windows: call F.scaled_dot_product_attention for windows too, as TIMM_FUSED_ATTN=2
            lets it; else timm writes their attention out.
    """

    def make(device: str, small: bool) -> Work:
        import timm

        if fuses_windows:
            timm.layers.set_fused_attn(True, experimental=True)
        model = _made(lambda: timm.create_model(name), device, torch.float32)
        count = 1 if small else batch
        images = torch.randn(count, 3, size, size, device=device)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
            images = images.to(memory_format=torch.channels_last)
        labels = torch.randint(1000, (count,), device=device)
        if trains:
            step = _training(
                model, lambda: F.cross_entropy(model(images), labels), device, autocast=True
            )
        else:

            def infer() -> torch.Tensor:
                with _autocast(device):
                    return model(images)

            step = _inference(model, infer)
        return Work(step, count, "images", (model,))

    return make


entry("convnext-base train", "timm")(_timm("convnext_base", 64))
entry("swin-base train", "timm")(_timm("swin_base_patch4_window7_224", 64))
entry("swin-base train", "timm", changed="fused attention")(
    _timm("swin_base_patch4_window7_224", 64, fuses_windows=True)
)
entry("efficientnet-b3 train", "timm")(_timm("efficientnet_b3", 64, size=300))
entry("resnet50 train", "timm")(_timm("resnet50", 128, channels_last=True))
entry("vit-base infer", "timm")(_timm("vit_base_patch16_224", 128, trains=False))


def _unet(device: str, small: bool, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """Stable Diffusion 1.5's UNet, and what it is called with."""
    import diffusers

    sizes: dict[str, Any] = dict(cross_attention_dim=768, attention_head_dim=8)
    if small:
        sizes = dict(
            block_out_channels=(32, 64),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=1,
            cross_attention_dim=32,
            attention_head_dim=4,
            norm_num_groups=8,
        )
    model = _made(lambda: diffusers.UNet2DConditionModel(**sizes), device, dtype)
    batch, side, width = (1, 8, 32) if small else (4, 64, 768)
    call = dict(
        sample=torch.randn(batch, 4, side, side, device=device, dtype=dtype),
        timestep=torch.randint(1000, (batch,), device=device),
        encoder_hidden_states=torch.randn(batch, 77, width, device=device, dtype=dtype),
    )
    return model, call


@entry("stable diffusion unet infer", "diffusers")
def _unet_infer(device: str, small: bool) -> Work:
    model, call = _unet(device, small, torch.float16 if device == "cuda" else torch.float32)
    step = _inference(model, lambda: model(**call).sample)
    return Work(step, call["sample"].shape[0], "images", (model,))


@entry("stable diffusion unet train", "diffusers")
def _unet_train(device: str, small: bool) -> Work:
    model, call = _unet(device, small, torch.float32)
    noise = torch.randn_like(call["sample"])
    step = _training(
        model, lambda: F.mse_loss(model(**call).sample.float(), noise), device, autocast=True
    )
    return Work(step, noise.shape[0], "images", (model,))


@entry("vae decode", "diffusers")
def _vae(device: str, small: bool) -> Work:
    import diffusers

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    channels = (32,) if small else (128, 256, 512, 512)
    model = _made(
        lambda: diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * len(channels),
            up_block_types=("UpDecoderBlock2D",) * len(channels),
            block_out_channels=channels,
            layers_per_block=1 if small else 2,
            latent_channels=4,
        ),
        device,
        dtype,
    )
    batch, side = (1, 8) if small else (4, 64)
    latents = torch.randn(batch, 4, side, side, device=device, dtype=dtype)
    step = _inference(model, lambda: model.decode(latents).sample)
    return Work(step, batch, "images", (model.decoder,))


@entry("flux transformer infer", "diffusers")
def _flux(device: str, small: bool) -> Work:
    import diffusers

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes: dict[str, Any] = dict(num_layers=6, num_single_layers=12)
    if small:
        sizes = dict(
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
            in_channels=4,
        )
    model = _made(lambda: diffusers.FluxTransformer2DModel(**sizes), device, dtype)
    config = model.config
    batch, pixels, words = (1, 16, 8) if small else (1, 4096, 512)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    call = dict(
        hidden_states=random(batch, pixels, config.in_channels),
        encoder_hidden_states=random(batch, words, config.joint_attention_dim),
        pooled_projections=random(batch, config.pooled_projection_dim),
        timestep=torch.full((batch,), 0.5, device=device, dtype=dtype),
        img_ids=torch.zeros(pixels, 3, device=device),
        txt_ids=torch.zeros(words, 3, device=device),
        guidance=None,
    )
    step = _inference(model, lambda: model(**call, return_dict=False)[0])
    return Work(step, batch, "images", (model,))


# --------------------------------------------------------------------------------- everything else


def _graph(kind: str) -> Callable[[str, bool], Work]:
    """Two layers over a random graph of the size of ogbn-arxiv, with ten times its edges."""

    def make(device: str, small: bool) -> Work:
        from torch_geometric import nn as geometric

        nodes, edges, width = (50, 200, 16) if small else (169_343, 4_000_000, 128)
        layer = getattr(geometric, kind)
        options: dict[str, Any] = dict(heads=4, concat=False) if kind == "GATConv" else {}

        class Network(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = layer(width, width, **options)
                self.second = layer(width, 40, **options)

            def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
                return self.second(self.first(x, graph).relu(), graph)

        model = _made(Network, device, torch.float32)
        x = torch.randn(nodes, width, device=device)
        graph = torch.randint(nodes, (2, edges), device=device)
        labels = torch.randint(40, (nodes,), device=device)
        step = _training(
            model, lambda: F.cross_entropy(model(x, graph), labels), device, autocast=False
        )
        return Work(step, nodes, "nodes", (model,))

    return make


entry("gcn train", "torch_geometric")(_graph("GCNConv"))
entry("graphsage train", "torch_geometric")(_graph("SAGEConv"))
entry("gat train", "torch_geometric")(_graph("GATConv"))


class _Dlrm(nn.Module):
    """Naumov et al., "Deep learning recommendation model", 2019: embedding bags, two perceptrons
    and the products of all pairs of features between them."""

    def __init__(self, tables: int, rows: int, width: int, dense: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum", sparse=False) for _ in range(tables)
        )
        self.bottom = nn.Sequential(
            nn.Linear(dense, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU()
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU()
        )
        self.out = nn.Linear(256, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        features = torch.stack(
            [bottom, *(bag(i) for bag, i in zip(self.bags, indices, strict=True))], 1
        )
        products = torch.bmm(features, features.transpose(1, 2))
        crossed = products[:, self.pairs[0], self.pairs[1]]
        return self.out(self.top(torch.cat((bottom, crossed), 1)))


@entry("dlrm train", "written here after the paper")
def _dlrm(device: str, small: bool) -> Work:
    tables, rows, width, batch = (3, 100, 8, 4) if small else (26, 200_000, 64, 16384)
    model = _made(lambda: _Dlrm(tables, rows, width, 13), device, torch.float32)
    dense = torch.randn(batch, 13, device=device)
    indices = torch.randint(rows, (tables, batch, 10), device=device)
    labels = torch.rand(batch, 1, device=device).round()

    def loss() -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(dense, indices), labels)

    return Work(_training(model, loss, device, autocast=False), batch, "samples", (model,))


@entry("torch transformer encoder train", "torch")
def _encoder(device: str, small: bool) -> Work:
    width, heads, layers = (32, 2, 1) if small else (1024, 16, 12)
    make = functools.partial(
        nn.TransformerEncoderLayer, width, heads, 4 * width, batch_first=True, norm_first=True
    )
    model = _made(
        lambda: nn.TransformerEncoder(make(), layers, enable_nested_tensor=False),
        device,
        torch.float32,
    )
    batch, length = (4, 16) if small else (16, 1024)
    x = torch.randn(batch, length, width, device=device)
    step = _training(model, lambda: model(x).square().mean(), device, autocast=True)
    return Work(step, batch * length, "tokens", (model,))
