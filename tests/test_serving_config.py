"""The plugin's front door: channels of configuration, refusals by name, and who gets which adapter."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from adapter_factory import BASE, random_pairs, write_adapter
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_spec.checkpoint import BaseGeometry
from lora_spec.errors import CheckpointError, EngineError, LoraSpecError, ParamsError
from lora_spec.serving import validate
from lora_spec.serving.channels import ENV_FILE, KEY, config_of, configure
from lora_spec.serving.config import DraftLoRAConfig, ServingConfig
from lora_spec.serving.frontend import FrontDoor
from lora_spec.serving.prefix_cache import extra_keys
from lora_spec.serving.stamp import BASE as BASE_STAMP
from lora_spec.serving.stamp import DraftAdapter, Stamp, read_stamp

DRAFT = {
    "adapters": {"a": "folder/a", "b": "folder/b"},
    "max_rank": 8,
    "map": {"target": "a"},
    "default": "b",
}


def engine_args(speculative: Any = None, additional: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=speculative, additional_config=additional or {}, scheduler_cls=None
    )


@pytest.fixture(autouse=True)
def no_environment(monkeypatch) -> None:
    monkeypatch.delenv(ENV_FILE, raising=False)


# ---------------------------------------------------------------- channels


def by_channel(channel: str, data: dict[str, Any], tmp_path: Path, monkeypatch) -> SimpleNamespace:
    plain = {"method": "draft_model", "model": "drafter", "num_speculative_tokens": 4}
    if channel == "speculative_config":
        return engine_args({**plain, **data})
    if channel == "additional_config":
        return engine_args(plain, {"other": 1, KEY: data})
    file = tmp_path / "serving.yaml"
    file.write_text(json.dumps(data))
    monkeypatch.setenv(ENV_FILE, str(file))
    return engine_args(plain)


CHANNELS = ("speculative_config", "additional_config", "environment")


@pytest.mark.parametrize("channel", CHANNELS)
def test_the_same_arguments_may_make_two_engines(channel, tmp_path, monkeypatch) -> None:
    args = by_channel(channel, {"draft_lora": DRAFT}, tmp_path, monkeypatch)
    assert configure(args) == configure(args) == ServingConfig(draft_lora=DraftLoRAConfig(**DRAFT))


@pytest.mark.parametrize("channel", CHANNELS)
def test_every_channel_says_the_same(channel, tmp_path, monkeypatch) -> None:
    args = by_channel(channel, {"draft_lora": DRAFT, "depth_policy": "policy.json"}, tmp_path, monkeypatch)
    given = args.speculative_config
    before = dict(given)
    config = configure(args)
    assert config == ServingConfig(draft_lora=DraftLoRAConfig(**DRAFT), depth_policy="policy.json")
    assert set(args.speculative_config) == {"method", "model", "num_speculative_tokens"}
    assert given == before, "the caller's own mapping is left alone"
    # It travels to the other processes in a form that pickles, hashes and reads back.
    assert json.loads(json.dumps(args.additional_config[KEY])) == args.additional_config[KEY]
    assert config_of(args) == config


@pytest.mark.parametrize("first", CHANNELS)
@pytest.mark.parametrize("second", CHANNELS)
def test_two_channels_are_one_too_many(first, second, tmp_path, monkeypatch) -> None:
    if first == second:
        return
    one = by_channel(first, {"depth_policy": "p.json"}, tmp_path, monkeypatch)
    two = by_channel(second, {"depth_policy": "p.json"}, tmp_path, monkeypatch)
    args = engine_args(
        {**one.speculative_config, **two.speculative_config},
        {**one.additional_config, **two.additional_config},
    )
    with pytest.raises(ParamsError, match="given twice"):
        configure(args)


def test_without_configuration_nothing_is_touched() -> None:
    speculative, additional = {"method": "ngram"}, {"other": 1}
    args = engine_args(speculative, additional)
    assert configure(args) is None
    assert args.speculative_config is speculative
    assert args.additional_config is additional
    assert config_of(args) is None


def test_the_command_lines_dashes_are_underscores() -> None:
    args = engine_args({"method": "draft_model", "depth-policy": "p.json"})
    assert configure(args) == ServingConfig(depth_policy="p.json")
    assert args.speculative_config == {"method": "draft_model"}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"draft_lora": {**DRAFT, "adaptors": {}}}, "draft_lora.adaptors"),
        ({"draft_lora": {**DRAFT, "map": {"target": "c"}}}, "unknown drafter adapter 'c'"),
        ({"draft_lora": {**DRAFT, "default": "c"}}, "unknown drafter adapter 'c'"),
        ({"draft_lora": {"adapters": {"none": "x"}}}, "'none'"),
        ({"draft_lora": {**DRAFT, "max_slots": 9, "max_cached": 8}}, "max_cached"),
        ({"draft_lora": {**DRAFT, "max_rank": 12}}, "max_rank"),
        ({"draft_lora": {**DRAFT, "max_slots": 0}}, "max_slots"),
        ({"draft_lora": {**DRAFT, "adapters": {"": "x"}}}, "adapters"),
        ({"draft_lora": {**DRAFT, "adapters": {"a\n": "x"}}}, "adapters"),
        ({"draft_lora": {**DRAFT, "adapters": {" ": "x"}}}, "adapters"),
        ({"draft_lora": {**DRAFT, "adapters": {"a\u202e": "x"}}}, "adapters"),
        ({"draft_lora": {**DRAFT, "adapters": {"a": ""}}}, "adapters"),
        ({"draft_lora": {**DRAFT, "max_rank": True}}, "max_rank"),
        ({"draft_lora": {**DRAFT, "max_slots": 10**9, "max_cached": 10**9}}, "max_slots"),
        ({"draft_lora": {**DRAFT, "map": {False: "a"}}}, "False"),
        ({"draft_lora": {**DRAFT, "map": {1: "a", "1": "b"}}}, "no word: 1"),
        ({"draft_lora": []}, "draft_lora"),
        ({"depth_policy": ""}, "depth_policy"),
        ({"depth_policy": 3}, "depth_policy"),
        ({"fixes": ["expand"]}, "neither"),
        ({"depth_policy": "p.json", "fixes": ["everything"]}, "fixes"),
    ],
)
def test_what_is_wrong_is_named(data, match) -> None:
    with pytest.raises(ParamsError, match=match):
        configure(engine_args({"method": "draft_model"}, {KEY: data}))


def test_a_name_that_yaml_takes_for_no_word_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "serving.yaml").write_text("draft_lora:\n  adapters: {no: folder}\n")
    monkeypatch.setenv(ENV_FILE, str(tmp_path / "serving.yaml"))
    with pytest.raises(ParamsError, match="False"):
        configure(engine_args({"method": "draft_model"}))


def test_both_spellings_at_once_are_refused() -> None:
    with pytest.raises(ParamsError, match="given twice"):
        configure(engine_args({"draft_lora": DRAFT, "draft-lora": {}}))


@pytest.mark.parametrize("key", ["lora-spec", "LoRA_Spec"])
def test_a_misspelt_key_is_not_passed_over(key) -> None:
    with pytest.raises(ParamsError, match="'lora_spec'"):
        configure(engine_args({"method": "draft_model"}, {key: {"draft_lora": DRAFT}}))


def test_additional_config_of_another_kind_is_named() -> None:
    with pytest.raises(ParamsError, match="must be a mapping"):
        configure(engine_args({"draft_lora": DRAFT}, SimpleNamespace()))


def test_a_configuration_file_that_is_none_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(ENV_FILE, str(tmp_path / "absent.yaml"))
    with pytest.raises(ParamsError, match=r"absent\.yaml"):
        configure(engine_args({"method": "draft_model"}))
    (tmp_path / "list.yaml").write_text("- 1\n")
    monkeypatch.setenv(ENV_FILE, str(tmp_path / "list.yaml"))
    with pytest.raises(ParamsError, match="mapping"):
        configure(engine_args({"method": "draft_model"}))


# ---------------------------------------------------------------- refusals of engines


def vllm_config(**changes: Any) -> SimpleNamespace:
    drafter = SimpleNamespace(
        model="drafter", architectures=changes.pop("architectures", ["LlamaForCausalLM"]),
        get_vocab_size=lambda size=changes.pop("drafter_vocab", 32): size,
    )  # fmt: skip
    speculative = SimpleNamespace(
        method=changes.pop("method", "draft_model"), draft_model_config=drafter,
        use_heterogeneous_vocab=changes.pop("heterogeneous", False),
    )  # fmt: skip
    parallel = {
        "world_size": 1, "data_parallel_size": 1, "nnodes": 1, "distributed_executor_backend": "uni",
    }  # fmt: skip
    parallel.update({key: changes.pop(key) for key in list(changes) if key in parallel})
    made = SimpleNamespace(
        speculative_config=speculative if changes.pop("speculation", True) else None,
        use_v2_model_runner=changes.pop("v2", False),
        scheduler_config=SimpleNamespace(async_scheduling=changes.pop("async_scheduling", False)),
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(get_vocab_size=lambda: 32),
    )
    assert not changes
    return made


ADAPTERS = ServingConfig(draft_lora=DraftLoRAConfig())
DEPTHS = ServingConfig(depth_policy="p.json")


@pytest.fixture
def tested_version(monkeypatch) -> None:
    monkeypatch.setattr(validate, "vllm_version", lambda: f"{validate.TESTED}.0")


@pytest.mark.parametrize("config", [ADAPTERS, DEPTHS])
@pytest.mark.usefixtures("tested_version")
def test_an_engine_that_can_act_is_let_through(config) -> None:
    validate.check_engine(vllm_config(), config)


@pytest.mark.parametrize(
    ("config", "changes", "code"),
    [
        (DEPTHS, {"speculation": False}, "no_speculation"),
        (DEPTHS, {"v2": True}, "model_runner_v2"),
        (DEPTHS, {"async_scheduling": True}, "async_scheduling"),
        (DEPTHS, {"world_size": 2}, "parallel"),
        (DEPTHS, {"data_parallel_size": 2}, "parallel"),
        (DEPTHS, {"distributed_executor_backend": "ray"}, "ray"),
        (ADAPTERS, {"method": "ngram"}, "method"),
        (ADAPTERS, {"method": "eagle3"}, "method"),
        (ADAPTERS, {"drafter_vocab": 48}, "vocabulary"),
        (ADAPTERS, {"heterogeneous": True}, "vocabulary"),
        (ADAPTERS, {"method": "dflash", "architectures": ["OtherDFlash"]}, "architecture"),
    ],
)
@pytest.mark.usefixtures("tested_version")
def test_an_engine_that_could_not_act_is_refused_by_name(config, changes, code) -> None:
    with pytest.raises(EngineError) as caught:
        validate.check_engine(vllm_config(**changes), config)
    assert caught.value.code == code


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0"])
def test_another_vllm_is_refused_by_name(version, monkeypatch) -> None:
    monkeypatch.setattr(validate, "vllm_version", lambda: version)
    with pytest.raises(EngineError, match=version) as caught:
        validate.check_engine(vllm_config(), DEPTHS)
    assert caught.value.code == "vllm_version"


def test_depths_work_for_every_method_and_vocabulary(tested_version) -> None:
    validate.check_engine(vllm_config(method="ngram", drafter_vocab=48), DEPTHS)


def test_a_scheduler_of_ones_own_is_refused() -> None:
    validate.check_scheduler(engine_args())
    args = engine_args()
    args.scheduler_cls = "my.Scheduler"
    with pytest.raises(EngineError, match=r"my\.Scheduler"):
        validate.check_scheduler(args)


# ---------------------------------------------------------------- refusals of adapters

BIG = BaseGeometry(
    num_layers=6, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=24, vocab_size=40
)
DFLASH = BaseGeometry(
    num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=4, intermediate_size=24,
    vocab_size=40, prefix="", fc=(16, 80),
)  # fmt: skip
RNG = np.random.default_rng(3)


def without(folder: Path, key: str) -> Path:
    """An adapter whose configuration lacks a key."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != key}))
    return folder


def embedding(rows: int) -> dict[str, np.ndarray]:
    return {
        "base_model.model.lm_head.lora_A.weight": RNG.normal(size=(4, 16)),
        "base_model.model.lm_head.lora_B.weight": RNG.normal(size=(rows, 4)),
    }


def test_a_fitting_adapter_is_known_by_its_content(tmp_path) -> None:
    one = validate.check_adapter("x", write_adapter(tmp_path / "one"), BASE, DraftLoRAConfig(max_rank=8))
    two = validate.check_adapter("y", write_adapter(tmp_path / "two"), BASE, DraftLoRAConfig(max_rank=8))
    other = write_adapter(tmp_path / "other", random_pairs(seed=1))
    three = validate.check_adapter("x", other, BASE, DraftLoRAConfig(max_rank=8))
    assert one.int_id == two.int_id > 0
    assert three.int_id != one.int_id
    assert one.path == str((tmp_path / "one").resolve())


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda d: write_adapter(d, random_pairs(base=BIG)), "shape_mismatch"),
        (lambda d: write_adapter(d, extra=embedding(40)), "head_or_embedding_adapted"),
        (lambda d: write_adapter(d, extra=embedding(64)), "vocabulary_resized"),
        (lambda d: write_adapter(d, random_pairs(rank=16), r=16), "rank"),
        (lambda d: write_adapter(d, use_dora=True), "dora"),
        (lambda d: write_adapter(d, peft_type="LOKR"), "unsupported_type"),
        (lambda d: write_adapter(d, modules_to_save=["lm_head"]), "modules_to_save"),
        (lambda d: write_adapter(d, bias="all"), "bias"),
        (lambda d: without(write_adapter(d, lora_alpha=8), "lora_alpha"), "bad_config"),
        (lambda d: without(write_adapter(d), "target_modules"), "bad_config"),
        (lambda d: write_adapter(d, lora_alpha=1e29), "too_large_update"),
        (
            lambda d: write_adapter(d, {n: (1e8 * a, 1e-8 * b) for n, (a, b) in random_pairs().items()}),
            "too_large_update",
        ),
        (lambda d: write_adapter(d, {n: (a, 0 * b) for n, (a, b) in random_pairs().items()}), "untrained"),
        (lambda d: write_adapter(d, shards=2), "sharded"),
        (lambda d: write_adapter(d, adapter="default"), "adapter_name_in_keys"),
        (lambda d: write_adapter(d, prefix=""), "prefix_missing"),
        (lambda d: write_adapter(d, prefix="base_model.model.language_model."), "no_matching_module"),
        (lambda d: write_adapter(d, random_pairs(layers=range(9))), "keys_without_module"),
    ],
)
def test_what_would_not_be_served_as_trained_is_refused(make, code, tmp_path) -> None:
    with pytest.raises(EngineError) as caught:
        validate.check_adapter("x", make(tmp_path / "adapter"), BASE, DraftLoRAConfig(max_rank=8))
    assert caught.value.code == code
    assert "'x'" in str(caught.value)


def test_what_is_no_adapter_is_refused(tmp_path) -> None:
    broken = random_pairs()
    next(iter(broken.values()))[0][0, 0] = np.nan
    for folder in (tmp_path / "absent", write_adapter(tmp_path / "nan", broken)):
        with pytest.raises(CheckpointError):
            validate.check_adapter("x", folder, BASE, DraftLoRAConfig(max_rank=8))


def dflash_pairs(fc: tuple[int, int]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    pairs = random_pairs(layers=range(2))
    pairs = {name.removeprefix("model."): pair for name, pair in pairs.items()}
    return pairs | {"fc": (RNG.normal(size=(4, fc[1])), RNG.normal(size=(fc[0], 4)))}


def test_a_dflash_drafters_adapter_has_an_fc_and_no_prefix(tmp_path) -> None:
    config = DraftLoRAConfig(max_rank=8)
    good = write_adapter(tmp_path / "good", dflash_pairs((16, 80)))
    validate.check_adapter("x", good, DFLASH, config)
    for folder, geometry, code in (
        (write_adapter(tmp_path / "taps", dflash_pairs((16, 48))), DFLASH, "shape_mismatch"),
        (good, BASE, "no_matching_module"),
        (write_adapter(tmp_path / "llama"), DFLASH, "no_matching_module"),
    ):
        with pytest.raises(EngineError) as caught:
            validate.check_adapter("x", folder, geometry, config)
        assert caught.value.code == code


# ---------------------------------------------------------------- who gets which adapter


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("drafters")
    return {name: str(write_adapter(root / name, random_pairs(seed=seed))) for seed, name in enumerate("abc")}


def front_door(folders: dict[str, str], **changes: Any) -> FrontDoor:
    draft = DraftLoRAConfig(**{"adapters": folders, "max_rank": 8, **changes})
    return FrontDoor(ServingConfig(draft_lora=draft), BASE)


def target(name: str | None) -> SimpleNamespace | None:
    return None if name is None else SimpleNamespace(lora_name=name, lora_path="nowhere")


NAMES = st.sampled_from(["a", "b", "c", "none"])


@settings(deadline=None)  # each example reads adapter folders
@given(
    field=st.one_of(st.none(), NAMES),
    mapped=st.dictionaries(st.sampled_from(["t1", "t2"]), NAMES),
    default=st.one_of(st.none(), NAMES),
    name=st.one_of(st.none(), st.sampled_from(["t1", "t2", "t3"])),
)
def test_field_beats_map_beats_default(folders, field, mapped, default, name) -> None:
    front = front_door(folders, map=mapped, default=default)
    stamp = front.resolve(None if field is None else {"draft_lora": field}, target(name))
    expected = next((found for found in (field, mapped.get(name), default) if found is not None), "none")
    found = "none" if stamp.draft_adapter is None else stamp.draft_adapter.name
    assert found == expected
    assert stamp.depth is None


@pytest.mark.parametrize("value", ["zzz", "", "A", 3, ["a"], True, {"name": "a"}])
def test_what_names_no_adapter_is_a_value_error(folders, value) -> None:
    front = front_door(folders)
    with pytest.raises(ValueError, match="draft"):
        front.resolve({"draft_lora": value})


@pytest.mark.parametrize("field", ["draft-lora", "Draft_LoRA"])
def test_a_misspelt_field_is_not_passed_over(folders, field) -> None:
    with pytest.raises(ValueError, match="'draft_lora'"):
        front_door(folders).resolve({field: "a"})


def test_nobody_stamps_his_own_request(folders) -> None:
    forged = Stamp(DraftAdapter("x", "/anywhere", "0" * 64)).to_extra_args(None)
    with pytest.raises(ValueError, match="server only"):
        front_door(folders).resolve(forged)


def test_without_drafter_adapters_a_request_cannot_ask_for_one(tmp_path) -> None:
    policy = write_policy(tmp_path / "p.json")
    front = FrontDoor(ServingConfig(depth_policy=str(policy)))
    with pytest.raises(ValueError, match="no drafter adapters"):
        front.resolve({"draft_lora": "a"})
    with pytest.raises(EngineError):
        front.register("a", tmp_path)


def test_names_come_and_go_and_requests_keep_what_they_had(folders, tmp_path) -> None:
    front = front_door({"a": folders["a"]}, default="a")
    before = front.resolve({"draft_lora": "a"})
    front.register("n", folders["b"])
    assert front.resolve({"draft_lora": "n"}).draft_adapter == front.adapters()["n"]
    front.register("n", folders["b"])  # the same content again
    with pytest.raises(EngineError) as caught:
        front.register("n", folders["c"])
    assert caught.value.code == "name_taken"
    kept = front.resolve({"draft_lora": "n"})
    front.register("n", folders["c"], replace=True)
    assert front.resolve({"draft_lora": "n"}).draft_adapter.int_id != kept.draft_adapter.int_id
    front.unregister("n")
    for gone in ("n", "never"):
        with pytest.raises(ValueError, match="unknown"):
            front.resolve({"draft_lora": gone})
        with pytest.raises(EngineError):
            front.unregister(gone)
    with pytest.raises(EngineError) as caught:
        front.unregister("a")
    assert caught.value.code == "in_use"
    with pytest.raises(LoraSpecError):
        front.register("bad", tmp_path)
    assert set(front.adapters()) == {"a"}
    assert front.resolve({"draft_lora": "a"}) == before


@pytest.mark.parametrize("name", ["", "none", " a", "a\n", "a\x1b[2J", "\u202e", "x" * 257, 5, None])
def test_reserved_names_are_refused(folders, name) -> None:
    with pytest.raises(EngineError):
        front_door(folders).register(name, folders["a"])


# ---------------------------------------------------------------- with a policy


def write_policy(path: Path, **adapters: dict[str, Any]) -> Path:
    path.write_text(
        json.dumps(
            {
                "schema": "lora-spec-policy/1",
                "base_model": "made-up",
                "default": {"depth": 1},
                "base": {"depth": 3},
                "adapters": adapters,
            }
        )
    )
    return path


def entry(content_hash: str, depth: int, drafter: str | None = None) -> dict[str, Any]:
    return {
        "content_hash": content_hash,
        "action": "amber" if depth else "red",
        "depth": depth,
        "drafter_adapter": drafter,
        "reasons": [{"code": "test", "sentence": "A test."}],
    }


def test_the_policy_gives_depth_and_drafter_adapter(folders, tmp_path) -> None:
    from lora_spec.checkpoint import content_hash

    served = write_adapter(tmp_path / "served", random_pairs(seed=9))
    policy = write_policy(tmp_path / "p.json", t1=entry(content_hash(served), 2, "b"), t2=entry("0" * 64, 0))
    draft = DraftLoRAConfig(adapters=folders, max_rank=8, default="c")
    front = FrontDoor(ServingConfig(draft_lora=draft, depth_policy=str(policy)), BASE)
    adapters = front.adapters()
    lora = SimpleNamespace(lora_name="t1", lora_path=str(served))
    assert front.resolve(None, lora) == Stamp(adapters["b"], 2)
    assert front.resolve({"draft_lora": "a"}, lora) == Stamp(adapters["a"], 2)
    assert front.resolve({"draft_lora": "none"}, lora) == Stamp(None, 2)
    assert front.resolve(None, None) == Stamp(adapters["c"], 3)
    # An entry made for other files than the served ones does not hold.
    assert front.resolve(None, SimpleNamespace(lora_name="t2", lora_path=str(served))) == Stamp(
        adapters["c"], 1
    )
    with pytest.raises(EngineError) as caught:
        front.unregister("b")
    assert caught.value.code == "in_use"


def test_what_never_drafts_takes_no_slot(folders, tmp_path) -> None:
    from lora_spec.checkpoint import content_hash

    served = write_adapter(tmp_path / "served", random_pairs(seed=9))
    policy = write_policy(tmp_path / "p.json", t1=entry(content_hash(served), 0))
    draft = DraftLoRAConfig(adapters=folders, max_rank=8, default="c")
    front = FrontDoor(ServingConfig(draft_lora=draft, depth_policy=str(policy)), BASE)
    lora = SimpleNamespace(lora_name="t1", lora_path=str(served))
    assert front.resolve(None, lora) == front.resolve({"draft_lora": "a"}, lora) == Stamp(None, 0)
    with pytest.raises(ValueError, match="unknown"):
        front.resolve({"draft_lora": "zzz"}, lora)


def test_a_policy_and_a_map_do_not_both_name_drafter_adapters(folders, tmp_path) -> None:
    policy = write_policy(tmp_path / "p.json", t1=entry("0" * 64, 2, "a"))
    draft = DraftLoRAConfig(adapters=folders, max_rank=8, map={"t2": "b"})
    with pytest.raises(EngineError) as caught:
        FrontDoor(ServingConfig(draft_lora=draft, depth_policy=str(policy)), BASE)
    assert caught.value.code == "two_maps"


def test_a_policy_that_names_an_unknown_drafter_adapter(folders, tmp_path) -> None:
    policy = write_policy(tmp_path / "p.json", t1=entry("0" * 64, 2, "zzz"))
    config = ServingConfig(draft_lora=DraftLoRAConfig(adapters=folders, max_rank=8), depth_policy=str(policy))
    with pytest.raises(EngineError, match="zzz"):
        FrontDoor(config, BASE)
    write_policy(policy, t1=entry("0" * 64, 2, "a"))
    front = FrontDoor(config, BASE)
    write_policy(policy, t1=entry("0" * 64, 3, "zzz"))
    assert not front.policy.reload(), "a bad later version keeps the old one"
    assert front.policy.current().adapters["t1"].depth == 2
    front.register("zzz", folders["a"])
    front.policy._next_look = 0.0
    assert front.policy.current().adapters["t1"].depth == 3, "it is valid now, though the file is the same"


# ---------------------------------------------------------------- stamps

HASHES = st.sampled_from(["1" * 64, "2" * 64])
STAMPS = st.builds(
    Stamp,
    st.one_of(st.none(), st.builds(DraftAdapter, st.sampled_from(["x", "y"]), st.just("p"), HASHES)),
    st.one_of(st.none(), st.integers(0, 4)),
)


def params(stamp: Stamp) -> SimpleNamespace:
    return SimpleNamespace(extra_args=stamp.to_extra_args({"draft_seed": 5}))


@given(STAMPS)
def test_a_stamp_survives_the_way_through_the_engine(stamp) -> None:
    made = params(stamp)
    assert json.loads(json.dumps(made.extra_args)) == made.extra_args
    assert read_stamp(made) == stamp
    assert made.extra_args["draft_seed"] == 5


@pytest.mark.parametrize(
    "made_up", ["x", 1, [], {}, {"draft_adapter": None}, {"draft_adapter": "x", "depth": 1}]
)
def test_what_is_no_stamp_stops_no_engine(made_up) -> None:
    assert read_stamp(SimpleNamespace(extra_args={"lora_spec": made_up})) is None


def test_no_stamp_is_told_from_the_base_stamp() -> None:
    assert read_stamp(SimpleNamespace(extra_args=None)) is None
    assert read_stamp(params(BASE_STAMP)) == BASE_STAMP


@given(STAMPS, STAMPS)
def test_blocks_are_shared_by_requests_whose_drafter_wrote_the_same(one, two) -> None:
    def keys(stamp: Stamp) -> list[tuple[str, str]]:
        return extra_keys(SimpleNamespace(sampling_params=params(stamp), lora_request=None))

    def wrote(stamp: Stamp) -> tuple[str | None, bool]:
        return stamp.draft_adapter and stamp.draft_adapter.content_hash, stamp.depth == 0

    assert (keys(one) == keys(two)) == (wrote(one) == wrote(two))
