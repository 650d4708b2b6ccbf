"""From options to a model that answers: file, tokenizer, graph, memory, runner, engine."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from invar.backends.cpu.runner import CpuRunner
from invar.backends.runner import RunnerInfo
from invar.config import EngineConfig
from invar.engine.budget import RunnerSizes, available_memory, drop_file_if_short, plan_sizes
from invar.engine.door import Door, SeedSource
from invar.engine.engine import Engine
from invar.engine.model_files import (
    TOKENS_KEY,
    ModelFile,
    ModelText,
    open_model,
    open_text,
    text_of,
)
from invar.engine.quantization import apply_quantization
from invar.engine.sampling_defaults import SamplingDefaults, overriding, sampling_defaults
from invar.grammar.compiler import GrammarCompiler
from invar.graph.graph import Graph, GraphError, WeightSource
from invar.graph.operations import KVFormat
from invar.graph.passes import with_kv_format, with_longest
from invar.models import registry
from invar.models.blocks import EMBEDDING
from invar.text.chat_template import ChatTemplate
from invar.text.reply_detection import ModelReplies, model_replies
from invar.text.tokenizer import Tokenizer
from invar.weights.gguf import GGUFFile
from invar.weights.sources import Wanted, resolve

if TYPE_CHECKING:
    from invar.engine.page_store import PageStore

logger = logging.getLogger("invar")


@dataclass
class LoadedEngine:
    """What computes: a model in memory and its engine. `close()` gives its memory back."""

    config: EngineConfig
    path: Path
    engine: Engine
    info: RunnerInfo

    @property
    def memory_table(self) -> tuple[tuple[str, int], ...]:
        """Rows (what, bytes) of the table that is shown at start."""
        store = self.engine.page_store
        if store is None or store.writer is None:
            return self.info.memory
        return (*self.info.memory, ("KV store: pages on their way", store.writer.size))

    def close(self) -> None:
        self.engine.close()


class TextSide(NamedTuple):
    """What whoever talks with a model has of it, and the engine has not."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    defaults: SamplingDefaults


@dataclass
class LoadedModel(LoadedEngine):
    """Everything that serves one model in this process."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    door: Door
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)  # of silent requests

    @cached_property
    def replies(self) -> ModelReplies | None:
        """How its replies are read; None: it cannot chat."""
        if self.chat_template is None:
            return None
        return model_replies(self.chat_template, self.tokenizer)[0]


def wanted_of(config: EngineConfig) -> Wanted:
    return Wanted(config.revision, config.load_format)


def model_path(config: EngineConfig) -> Path:
    return resolve(config.model, wanted=wanted_of(config))


def tokenizer_path(config: EngineConfig) -> Path:
    return resolve(config.tokenizer, wanted=Wanted(config.tokenizer_revision))


def load_engine(config: EngineConfig) -> LoadedModel:
    """Reads a model and builds its engine, with the text side of it.

    Raises ValueError (or one of its kinds: ModelSourceError, GGUFError, ConfigError, GraphError,
    DoesNotFit) for what is wrong with the options, the file or the memory.
    """
    overriding(config)  # before anything is read
    path = model_path(config)
    with open_model(path) as source, ThreadPoolExecutor(max_workers=1) as beside:
        # Packing leaves the interpreter to others, so the text side is built meanwhile.
        text = beside.submit(load_text, config, text_of(source))
        computing = build_engine(config, path, source)
        try:
            side = text.result()
        except BaseException:
            computing.close()
            raise
    engine = computing.engine
    grammars = engine.guidance.grammars
    assert grammars is not None
    grammars.load = lambda: side.tokenizer  # it is here already
    door = door_of(
        config,
        side,
        grammars,
        vocab_size=computing.info.vocab_size,
        max_model_len=engine.max_model_len,
        kv_capacity_tokens=engine.kv_capacity_tokens,
    )
    return LoadedModel(
        config,
        path,
        engine,
        computing.info,
        side.tokenizer,
        side.chat_template,
        door,
        side.defaults,
    )


def load_engine_alone(config: EngineConfig) -> LoadedEngine:
    """`load_engine` without the text side, for a process that computes and no more."""
    path = model_path(config)
    with open_model(path) as source:
        return build_engine(config, path, source)


def load_text_alone(config: EngineConfig) -> TextSide:
    """The text side of the model whose engine runs in another process."""
    with open_text(model_path(config)) as text:
        return load_text(config, text)


@dataclass(frozen=True)
class PlannedEngine:
    """All that is decided before memory is taken."""

    graph: Graph
    weights: WeightSource
    sizes: RunnerSizes


def plan_engine(config: EngineConfig, path: Path, source: ModelFile) -> PlannedEngine:
    """Raises ValueError as `load_engine` does."""
    graph = with_kv_format(registry.build(source), KVFormat(config.kv_format))
    graph = with_longest(graph, config.max_model_len or graph.max_positions)
    weights = apply_quantization(config.quantization, graph, source, path.name)
    vocab_size = vocabulary_size(config, source) or graph.vocab_size
    refuse_tokens_without_rows(graph, vocab_size, source)
    sizes = plan_sizes(config, graph, weights, path.name, min(vocab_size, graph.vocab_size))
    return PlannedEngine(graph, weights, sizes)


def build_engine(config: EngineConfig, path: Path, source: ModelFile) -> LoadedEngine:
    plan = plan_engine(config, path, source)
    available = available_memory()
    runner = CpuRunner(plan.graph, plan.weights, **vars(plan.sizes))
    drop_file_if_short(source, sum(size for _, size in runner.info.memory), available)
    try:
        refuse_more_logprobs(config, runner.info)
    except BaseException:
        runner.close()
        raise
    # Eager is slower than need be, so it is said to those too who see warnings alone.
    logger.log(logging.WARNING if config.enforce_eager else logging.INFO, runner.info.plan)
    engine = Engine(
        runner,
        policy=config.scheduling_policy,
        prefix_caching=config.enable_prefix_caching is not False,
        store=page_store(config, source, runner.info),
        store_salted=config.kv_store_salted,
        paces_prompts=config.paces_prompts,
        grammars=GrammarCompiler(lambda: load_text_alone(config).tokenizer, runner.info.vocab_size),
    )
    return LoadedEngine(config, path, engine, runner.info)


def door_of(
    config: EngineConfig,
    text: TextSide,
    grammars: GrammarCompiler | None = None,
    *,
    vocab_size: int,
    max_model_len: int,
    kv_capacity_tokens: int,
) -> Door:
    tokenizer = text.tokenizer
    return Door(
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        kv_capacity_tokens=kv_capacity_tokens,
        eos_token_ids=tokenizer.stop_token_ids,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False, parse_special=False),
        max_logprobs=config.max_logprobs,
        seeds=SeedSource(config.seed),
        grammars=grammars or GrammarCompiler(lambda: tokenizer, vocab_size),
        leading_space=tokenizer.strips_leading_space,
        form_defaults=config.form_defaults,
    )


def page_store(config: EngineConfig, source: ModelFile, info: RunnerInfo) -> PageStore | None:
    """The page store that the options ask for, if it can be used."""
    if config.kv_store is None or config.enable_prefix_caching is False:
        return None
    # Without a store a start does not wait for its modules.
    from invar.engine.page_file import PageLayout
    from invar.engine.page_store import open_store

    # The fingerprint has samples of the weights; where any other byte has changed, so has the time.
    files = [path.stat() for path in source.shard_paths]
    stamps = [(status.st_size, status.st_mtime_ns) for status in files]
    page_bytes = [group.page_bytes for group in info.groups]
    layout = PageLayout(f"{info.kv_fingerprint} {stamps}", page_bytes)
    return open_store(Path(config.kv_store), layout, config.kv_store_bytes)


def load_text(config: EngineConfig, text: ModelText) -> TextSide:
    tokenizer, defaults = load_tokenizer(config, text), sampling_defaults(config, text)
    tokenizer.stop_token_ids |= defaults.eos_token_ids  # for grammars too, not the door alone
    return TextSide(tokenizer, load_template(config, text), defaults)


def load_tokenizer(config: EngineConfig, text: ModelText) -> Tokenizer:
    if config.tokenizer is None or config.tokenizer == config.model:
        return text.tokenizer()
    with open_text(tokenizer_path(config)) as other:
        return other.tokenizer()


def load_template(config: EngineConfig, text: ModelText) -> ChatTemplate | None:
    """The model's own template, or the text (or file) that the options give in its place."""
    given = config.chat_template
    if given is not None and "\n" not in given and "{" not in given:  # no template without them
        given = Path(given).read_text(encoding="utf-8")
    return text.template(given)


def refuse_more_logprobs(config: EngineConfig, info: RunnerInfo) -> None:
    if config.max_logprobs > info.max_top_logprobs:
        raise ValueError(
            f"max_logprobs: {config.max_logprobs} is more than the {info.max_top_logprobs} that "
            f"the backend reports"
        )


def refuse_tokens_without_rows(graph: Graph, vocab_size: int, source: ModelFile) -> None:
    """Rows beyond the tokens are padding; a token without a row is another model's tokenizer."""
    if vocab_size > graph.vocab_size:
        where = TOKENS_KEY if isinstance(source, GGUFFile) else "tokenizer.json"
        raise GraphError(
            f"{where} has {vocab_size} tokens, but {EMBEDDING} only {graph.vocab_size} rows; "
            "tokenizer and weights are of different models, or the file is damaged"
        )


def vocabulary_size(config: EngineConfig, source: ModelFile) -> int | None:
    """Ids of the tokenizer, told without building it; None: the model's own count must do."""
    own = text_of(source).token_count()
    if config.tokenizer is None or config.tokenizer == config.model:
        return own
    with open_text(tokenizer_path(config)) as other:
        count = other.token_count()
    if own is not None and count is not None and count != own:
        raise ValueError(
            f"tokenizer: {config.tokenizer} has {count} tokens, {source.path.name} was made with "
            f"{own}; leave the option out to use the model's own"
        )
    return count
