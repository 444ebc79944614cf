"""Reading adapters from untrusted sources: the cases of public reports, and files broken on purpose."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from adapter_factory import (
    ALL_TYPES,
    BASE,
    config_of,
    module_name,
    random_pairs,
    tensors_of,
    write_adapter,
    write_raw,
    write_safetensors,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_spec.checkpoint import (
    ERROR_CODES,
    REASONS,
    BaseGeometry,
    EngineRule,
    Severity,
    content_hash,
    read_adapter,
)
from lora_spec.errors import CheckpointError
from lora_spec.features import feature_row

WEIGHTS = "adapter_model.safetensors"
QV = random_pairs(types=("q", "v"))
FIRST_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def codes(adapter) -> set[str]:
    return {item.code for item in adapter.reasons}


def abstaining(adapter) -> set[str]:
    return {item.code for item in adapter.reasons if item.severity is Severity.ABSTAIN}


def refused(directory: Path, code: str, *mentions: str, **options) -> None:
    assert code in ERROR_CODES
    with pytest.raises(CheckpointError) as caught:
        read_adapter(directory, **options)
    assert caught.value.code == code
    text = str(caught.value)
    assert "\n" not in text
    for mention in mentions:
        assert mention in text


def test_a_plain_adapter_is_read_whole(tmp_path):
    adapter = read_adapter(write_adapter(tmp_path / "a"), BASE)
    assert not adapter.reasons and not adapter.abstains
    assert [m.name for m in adapter.modules[:2]] == [module_name("q", 0), module_name("k", 0)]
    assert len(adapter.modules) == 42 and adapter.num_layers == 6
    module = adapter.modules[0]
    a, b = random_pairs()[module.name]
    np.testing.assert_array_equal(module.read_a(), a.astype(np.float32))
    np.testing.assert_array_equal(module.read_b(), b.astype(np.float32))
    assert (module.rank, module.in_features, module.out_features) == (4, 16, 16)
    assert module.scale == module.engine_scale == 2.0
    assert module.pair_bytes == (4 * 16 + 16 * 4) * 4


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_number_formats_are_widened_exactly(tmp_path, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[dtype]
    module = read_adapter(write_adapter(tmp_path / "a", QV, dtype=dtype), BASE).modules[0]
    np.testing.assert_array_equal(
        module.read_b(), QV[module.name][1].astype(np.float32 if dtype != "F64" else np.float64).astype(kind)
    )


# --- the cases of public reports, by number ---


@pytest.mark.parametrize("prefix", ["base_model.model.model.language_model.", "base_model.model."])
def test_case_1_keys_of_another_base_match_nothing(tmp_path, prefix):
    pairs = {name.removeprefix("model."): pair for name, pair in QV.items()}
    directory = write_adapter(tmp_path / "a", pairs, prefix=prefix)
    assert "no_matching_module" in abstaining(read_adapter(directory, BASE))
    assert "unusual_prefix" in abstaining(read_adapter(directory))


def test_case_1_some_keys_outside_the_base(tmp_path):
    pairs = random_pairs(types=("q",), layers=range(8))
    adapter = read_adapter(write_adapter(tmp_path / "a", pairs), BASE)
    assert abstaining(adapter) == {"keys_without_module"}
    assert len(adapter.modules) == 6


def test_case_1_other_architecture(tmp_path):
    pair = (np.ones((4, 16)), np.ones((16, 4)))
    adapter = read_adapter(write_adapter(tmp_path / "a", {"transformer.h.0.attn.c_attn": pair}), BASE)
    assert abstaining(adapter) == {"no_matching_module", "no_lora_tensors"}
    adapter = read_adapter(
        write_adapter(tmp_path / "b", {**QV, "model.layers.0.mlp.experts.0.up_proj": pair})
    )
    assert abstaining(adapter) == {"unknown_module"}


def test_case_1_shapes_of_another_base(tmp_path):
    other = BaseGeometry(6, 32, 4, 2, 4, 24, 40)
    assert abstaining(read_adapter(write_adapter(tmp_path / "a", QV), other)) == {"shape_mismatch"}


def test_case_2_modules_the_server_does_not_wrap(tmp_path):
    directory = write_adapter(tmp_path / "a", QV)
    assert abstaining(read_adapter(directory, BASE, served_modules=["down_proj"])) == {"not_served"}
    assert abstaining(read_adapter(directory, BASE, served_modules=["q_proj"])) == {"partly_served"}
    assert not read_adapter(directory, BASE, served_modules=["qkv_proj"]).abstains


PATTERN_CASES = [
    # rank_pattern, alpha_pattern, module → rank, alpha
    ({"q_proj": 2}, {}, ("q", 3), 2, 8),
    ({"layers.3.self_attn.q_proj": 2}, {"q_proj": 32}, ("q", 3), 2, 32),
    ({"layers.3.self_attn.q_proj": 2}, {"q_proj": 32}, ("q", 4), 4, 32),
    ({r"^model.layers.[0-3].self_attn.v_proj": 6}, {}, ("v", 3), 6, 8),
    ({r"^model.layers.[0-3].self_attn.v_proj": 6}, {}, ("v", 4), 4, 8),
    ({"proj": 2}, {}, ("q", 0), 4, 8),  # no dot before "proj": not a match
    ({r".*_proj": 2, "q_proj": 3}, {}, ("q", 0), 2, 8),  # the first pattern wins
    ({"q_proj|v_proj": 2}, {r"(k|v)_proj": 5.5}, ("v", 0), 2, 5.5),
]


@pytest.mark.parametrize(("ranks", "alphas", "place", "rank", "alpha"), PATTERN_CASES)
@pytest.mark.parametrize("rslora", [False, True])
def test_case_3_and_4_scale_as_peft_resolves_it(tmp_path, ranks, alphas, place, rank, alpha, rslora):
    name = module_name(*place)
    pairs = random_pairs(rank=rank, types=(place[0],), layers=range(place[1], place[1] + 1))
    directory = write_adapter(
        tmp_path / "a", pairs, rank_pattern=ranks, alpha_pattern=alphas, use_rslora=rslora
    )
    (module,) = read_adapter(directory, BASE).modules
    assert module.name == name
    assert module.scale == pytest.approx(alpha / (rank**0.5 if rslora else rank))
    assert module.engine_scale == module.scale
    (module,) = read_adapter(directory, BASE, engine=EngineRule.GLOBAL).modules
    assert module.engine_scale == pytest.approx(8 / 2 if rslora else 8 / 4)


def test_case_3_an_engine_that_ignores_patterns_abstains(tmp_path):
    directory = write_adapter(tmp_path / "a", QV, alpha_pattern={"q_proj": 32})
    adapter = read_adapter(directory, BASE)
    assert not adapter.abstains and codes(adapter) == {"scale_depends_on_engine"}
    assert abstaining(read_adapter(directory, BASE, engine=EngineRule.GLOBAL)) == {"engine_scale_differs"}
    # Patterns that change nothing are nothing to speak of.
    same = write_adapter(tmp_path / "b", QV, alpha_pattern={"q_proj": 8})
    assert not read_adapter(same, BASE, engine=EngineRule.GLOBAL).reasons


def test_case_3_stored_rank_differs_from_the_configured_one(tmp_path):
    assert abstaining(read_adapter(write_adapter(tmp_path / "a", QV, r=8), BASE)) == {
        "rank_not_as_configured"
    }


@pytest.mark.parametrize("pattern", ["(a+)+b", "(.*)*", "((a|b)(c|d)(e|f))", "q_proj(", "a?b?c?d?e", "[z-a]"])
def test_case_3_patterns_that_could_run_for_ever(tmp_path, pattern):
    refused(
        write_adapter(tmp_path / "a", QV, rank_pattern={pattern: 4}), "unsafe_pattern", "adapter_config.json"
    )


def test_case_5_dora(tmp_path):
    extra = {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": np.ones(16)}
    assert "dora" in abstaining(read_adapter(write_adapter(tmp_path / "a", QV, extra=extra), BASE))
    assert "dora" in abstaining(read_adapter(write_adapter(tmp_path / "b", QV, use_dora=True), BASE))


def test_case_6_head_and_embedding_saved(tmp_path):
    extra = {
        "base_model.model.lm_head.weight": np.ones((40, 16)),
        "base_model.model.model.embed_tokens.weight": np.ones((40, 16)),
    }
    directory = write_adapter(tmp_path / "a", QV, extra=extra, modules_to_save=["lm_head", "embed_tokens"])
    assert abstaining(read_adapter(directory, BASE)) == {"modules_to_save"}


@pytest.mark.parametrize(
    "extra",
    [
        {"base_model.model.lm_head.weight": np.ones((48, 16))},
        {"base_model.model.model.embed_tokens.base_layer.weight": np.ones((48, 16))},
        {"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 48))},
        tensors_of({"lm_head": (np.ones((4, 16)), np.ones((48, 4)))}),
    ],
)
def test_case_6_resized_vocabulary(tmp_path, extra):
    adapter = read_adapter(write_adapter(tmp_path / "a", QV, extra=extra), BASE)
    (found,) = [item for item in adapter.reasons if item.code == "vocabulary_resized"]
    assert "48" in found.sentence and "40" in found.sentence and adapter.abstains


def test_case_6_lora_on_head_or_embedding(tmp_path):
    head = {"lm_head": (np.ones((4, 16)), np.ones((40, 4)))}
    adapter = read_adapter(write_adapter(tmp_path / "a", {**QV, **head}), BASE)
    assert abstaining(adapter) == {"head_or_embedding_adapted"} and len(adapter.modules) == 12


def test_case_7_base_embeddings_stored(tmp_path):
    extra = {"base_model.model.model.embed_tokens.weight": np.ones((40, 16))}
    assert abstaining(read_adapter(write_adapter(tmp_path / "a", QV, extra=extra), BASE)) == {
        "embedding_weights_stored"
    }


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_case_8_not_finite(tmp_path, value, dtype):
    pairs = random_pairs(types=("q",))
    pairs[module_name("q", 2)][1][7, 1] = value
    directory = write_adapter(tmp_path / "a", pairs, dtype=dtype)
    refused(directory, "non_finite", WEIGHTS, "layers.2.self_attn.q_proj.lora_B.weight")


def test_case_9_pickles_are_never_opened(tmp_path):
    beside = write_adapter(tmp_path / "a", QV)
    (beside / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert codes(read_adapter(beside, BASE)) == {"pickle_ignored"}
    (beside / WEIGHTS).unlink()
    refused(beside, "pickle_refused", "adapter_model.bin")


@pytest.mark.parametrize("targets", [["v_proj", "q_proj"], "all-linear", r".*\.(q|v)_proj", None])
def test_case_10_target_modules_in_every_form(tmp_path, targets):
    adapter = read_adapter(write_adapter(tmp_path / "a", QV, target_modules=targets), BASE)
    assert not adapter.reasons and len(adapter.modules) == 12


def fused_pairs() -> dict:
    plain = random_pairs(rank=4)
    made = {}
    for layer in range(6):
        for fused, parts in (("qkv", "qkv"), ("gate_up", ("gate", "up"))):
            block = "self_attn" if fused == "qkv" else "mlp"
            a = plain[module_name(parts[0], layer)][0]
            b = np.concatenate([plain[module_name(part, layer)][1] for part in parts])
            made[f"model.layers.{layer}.{block}.{fused}_proj"] = (a, b)
    return made


def test_case_11_fused_projections(tmp_path):
    directory = write_adapter(tmp_path / "a", fused_pairs())
    assert abstaining(read_adapter(directory)) == {"fused_modules"}
    adapter = read_adapter(directory, BASE)
    assert codes(adapter) == {"fused_split"} and len(adapter.modules) == 30
    value = next(m for m in adapter.modules if m.name == module_name("v", 3))
    np.testing.assert_array_equal(value.read_b(), random_pairs()[value.name][1].astype(np.float32))
    assert value.pair_bytes == (4 * 16 + 8 * 4) * 4


def test_case_11_fused_and_alone_at_once(tmp_path):
    both = {**fused_pairs(), **random_pairs(types=("q",))}
    refused(write_adapter(tmp_path / "a", both), "duplicate_key", base=BASE)


def test_case_11_part_of_a_packed_group_is_ordinary(tmp_path):
    assert not read_adapter(write_adapter(tmp_path / "a", random_pairs(types=("k", "up"))), BASE).reasons


@pytest.mark.parametrize("kind", ["LOKR", "LOHA", "IA3", "VERA", "PROMPT_TUNING", "ADALORA", "SOMETHING_NEW"])
def test_case_12_other_types_by_name(tmp_path, kind):
    directory = write_adapter(tmp_path / "a", {}, extra={"x.y": np.ones(3)}, peft_type=kind)
    adapter = read_adapter(directory, BASE)
    (found,) = [item for item in adapter.reasons if item.code == "unsupported_type"]
    assert kind in found.sentence and adapter.abstains and not adapter.modules


def test_case_13_never_trained(tmp_path):
    zero = {name: (a, b * -0.0) for name, (a, b) in QV.items()}
    for dtype in ("F32", "BF16"):
        adapter = read_adapter(write_adapter(tmp_path / dtype, zero, dtype=dtype), BASE)
        assert codes(adapter) == {"untrained"} and not adapter.abstains
    assert codes(read_adapter(write_adapter(tmp_path / "a", QV, lora_alpha=0), BASE)) == {"untrained"}
    some = {**QV, module_name("q", 1): zero[module_name("q", 1)]}
    adapter = read_adapter(write_adapter(tmp_path / "b", some), BASE)
    assert codes(adapter) == {"partly_untrained"}


def test_case_14_names_shards_and_an_unnamed_base(tmp_path):
    adapter = read_adapter(write_adapter(tmp_path / "a", QV, adapter="default"), BASE)
    assert codes(adapter) == {"adapter_name_in_keys"} and len(adapter.modules) == 12
    adapter = read_adapter(write_adapter(tmp_path / "b", QV, shards=3), BASE)
    assert codes(adapter) == {"sharded"} and len(adapter.modules) == 12
    adapter = read_adapter(write_adapter(tmp_path / "c", QV, base_model_name_or_path=None), BASE)
    assert codes(adapter) == {"base_unnamed"}
    adapter = read_adapter(write_adapter(tmp_path / "d", QV, prefix=""), BASE)
    assert codes(adapter) == {"prefix_missing"} and len(adapter.modules) == 12
    adapter = read_adapter(write_adapter(tmp_path / "e", QV, base_model_name_or_path="some/other"), BASE)
    assert codes(adapter) == {"base_differs"}
    mirror = write_adapter(tmp_path / "f", QV, base_model_name_or_path="/models/Tiny-Llama/")
    assert not read_adapter(mirror, BASE).reasons


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_changes_base"),
        ({"init_lora_weights": "olora"}, "init_changes_base"),
        ({"layer_replication": [[0, 2], [1, 4]]}, "unsupported_feature"),
        ({"alora_invocation_tokens": [1, 2]}, "unsupported_feature"),
        ({"trainable_token_indices": [3]}, "unsupported_feature"),
    ],
)
def test_configuration_outside_the_features(tmp_path, config, code):
    assert abstaining(read_adapter(write_adapter(tmp_path / "a", QV, **config), BASE)) == {code}


def test_tensors_outside_the_features(tmp_path):
    for number, (name, code) in enumerate(
        {
            "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias": "bias",
            "base_model.model.model.layers.0.self_attn.q_proj.bias": "bias",
            "base_model.model.model.norm.weight": "modules_to_save",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_diag": "unknown_tensor",
            "whatever": "unknown_tensor",
        }.items()
    ):
        directory = write_adapter(tmp_path / str(number), QV, extra={name: np.ones(16)})
        assert abstaining(read_adapter(directory, BASE)) == {code}


# --- broken and hostile folders ---


def test_paths_that_are_no_adapter_folder(tmp_path):
    refused(tmp_path / "none", "not_found", "none")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "not_a_folder")
    refused(tmp_path, "not_an_adapter", "adapter_config.json")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config_of()))
    refused(tmp_path, "not_an_adapter", WEIGHTS)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "bad_json"),
        ("[]", "bad_json"),
        ("{", "bad_json"),
        ('{"r": 4, "r": 8}', "bad_json"),
        ('{"r": NaN}', "bad_json"),
        ("[" * 100_000, "bad_json"),
        ('{"a":' * 100_000, "bad_json"),
        ('{"peft_type": ' + "9" * 10_000 + "}", "bad_json"),
        (" " * (5 << 20), "too_large"),
        ("{}", "bad_config"),
        ('{"peft_type": 3}', "bad_config"),
        ('{"peft_type": "LORA", "r": 0}', "bad_config"),
        ('{"peft_type": "LORA", "r": true}', "bad_config"),
        ('{"peft_type": "LORA", "r": "8"}', "bad_config"),
        ('{"peft_type": "LORA", "lora_alpha": 1e999}', "bad_config"),
        ('{"peft_type": "LORA", "rank_pattern": {"q": 0}}', "bad_config"),
        ('{"peft_type": "LORA", "alpha_pattern": {"q": null}}', "bad_config"),
        ('{"peft_type": "LORA", "rank_pattern": [1]}', "bad_config"),
        ('{"peft_type": "LORA", "modules_to_save": "lm_head"}', "bad_config"),
        ('{"peft_type": "LORA", "use_rslora": "no"}', "bad_config"),
        ('{"peft_type": "LORA", "target_modules": [3]}', "bad_config"),
        ('{"peft_type": "LORA", "r": 4, "target_modules": ["\\ud800"]}', "bad_json"),
    ],
)
def test_broken_configurations(tmp_path, text, code):
    directory = write_adapter(tmp_path / "a", QV)
    (directory / "adapter_config.json").write_text(text)
    refused(directory, code, "adapter_config.json")


def test_a_configuration_that_is_not_utf8(tmp_path):
    directory = write_adapter(tmp_path / "a", QV)
    (directory / "adapter_config.json").write_bytes(b'{"peft_type": "\xff"}')
    refused(directory, "bad_json")


def entry(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data", "code"),
    [
        ({"a": entry()}, 8, "truncated"),
        ({"a": entry(), "b": entry(offsets=(8, 24))}, 24, "bad_header"),  # overlap
        ({"a": entry(), "b": entry()}, 16, "bad_header"),  # the same bytes twice
        ({"a": entry(offsets=(8, 24))}, 24, "bad_header"),  # hole
        ({"a": entry()}, 20, "bad_header"),  # rest
        ({"a": entry(offsets=(16, 0))}, 16, "bad_header"),
        ({"a": entry(offsets=(-16, 0))}, 16, "bad_header"),
        ({"a": entry(offsets=(0, 1 << 62))}, 16, "bad_header"),
        ({"a": entry(shape=(2, 3))}, 16, "bad_header"),
        ({"a": entry(shape=(-2, -2))}, 16, "bad_header"),
        ({"a": entry(shape=(2.0, 2))}, 16, "bad_header"),
        ({"a": entry(shape=(True, 4))}, 16, "bad_header"),
        ({"a": entry(shape=(1 << 40, 1 << 40))}, 16, "bad_header"),
        ({"a": entry(dtype="F31")}, 16, "bad_header"),
        ({"a": entry(dtype=["F32"])}, 16, "bad_header"),
        ({"a": [1]}, 16, "bad_header"),
        ({"a": {"dtype": "F32"}}, 16, "bad_header"),
        ({"a\x1b[2J": entry()}, 16, "bad_header"),
        ({"a" * 1000: entry()}, 16, "bad_header"),
    ],
)
def test_broken_headers(tmp_path, header, data, code):
    directory = write_adapter(tmp_path / "a", QV)
    write_raw(directory / WEIGHTS, json.dumps(header).encode(), bytes(data))
    refused(directory, code, WEIGHTS)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "truncated"),
        (b"\x01\x00", "truncated"),
        (struct.pack("<Q", 1 << 60) + b"{}", "too_large"),
        (struct.pack("<Q", 100) + b"{}", "truncated"),
        (struct.pack("<Q", 2) + b"[]", "bad_json"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "bad_json"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "too_large"),
    ],
)
def test_files_that_are_not_safetensors(tmp_path, content, code):
    directory = write_adapter(tmp_path / "a", QV)
    (directory / WEIGHTS).write_bytes(content)
    refused(directory, code, WEIGHTS)


def test_a_name_twice_in_the_header(tmp_path):
    directory = write_adapter(tmp_path / "a", QV)
    one = json.dumps(entry())
    write_raw(directory / WEIGHTS, f'{{"a": {one}, "a": {one}}}'.encode(), bytes(16))
    refused(directory, "bad_json", WEIGHTS, "'a'")


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_truncated_download(tmp_path, cut):
    directory = write_adapter(tmp_path / "a", QV)
    whole = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(whole[:-cut])
    refused(directory, "truncated", "lora_")


def test_a_file_that_changes_between_header_and_data(tmp_path):
    directory = write_adapter(tmp_path / "a", QV)
    adapter = read_adapter(directory, BASE, full=False)
    write_adapter(directory, random_pairs(seed=1, types=("q",)))
    with pytest.raises(CheckpointError) as caught:
        adapter.modules[0].read_a()
    assert caught.value.code == "unreadable"


def rewrite(directory: Path, change) -> Path:
    tensors = tensors_of(QV)
    change(tensors)
    write_safetensors(directory / WEIGHTS, tensors)
    return directory


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda t: t.pop(FIRST_B), "missing_half"),
        (lambda t: t.pop(FIRST_B.replace("_B", "_A")), "missing_half"),
        (lambda t: t.update({FIRST_B: np.ones((16, 3))}), "rank_mismatch"),
        (lambda t: t.update({FIRST_B: np.ones(64)}), "bad_shape"),
        (lambda t: t.update({FIRST_B: np.ones((0, 4))}), "bad_shape"),
        (lambda t: t.update({FIRST_B: np.ones((16, 4, 1, 1))}), "bad_shape"),
        (
            lambda t: t.update({FIRST_B.replace(".weight", ".default.weight"): np.ones((16, 4))}),
            "duplicate_key",
        ),
        (lambda t: t.update({FIRST_B.removeprefix("base_model.model."): np.ones((16, 4))}), "duplicate_key"),
    ],
)
def test_factors_that_do_not_fit(tmp_path, change, code):
    refused(rewrite(write_adapter(tmp_path / "a", QV), change), code, "layers.0.self_attn.q_proj")


def test_quantised_factors(tmp_path):
    refused(write_adapter(tmp_path / "a", QV, dtype="I8"), "bad_dtype", "lora_", "I8")


def test_a_rank_beyond_reason(tmp_path):
    pairs = {module_name("q", 0): (np.zeros((5000, 16)), np.zeros((16, 5000)))}
    refused(write_adapter(tmp_path / "a", pairs, r=5000), "too_large")


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
def test_links_out_of_the_folder_are_not_followed(tmp_path, name):
    directory = write_adapter(tmp_path / "a", QV)
    outside = tmp_path / name
    (directory / name).rename(outside)
    (directory / name).symlink_to(outside)
    refused(directory, "outside_folder", name)


def test_a_link_within_the_folder_or_to_it_is_fine(tmp_path):
    directory = write_adapter(tmp_path / "a", QV)
    (directory / WEIGHTS).rename(directory / "blob")
    (directory / WEIGHTS).symlink_to("blob")
    (tmp_path / "link").symlink_to(directory)
    assert not read_adapter(tmp_path / "link", BASE).reasons


def test_a_dangling_link_and_a_pipe_do_not_hang(tmp_path):
    directory = write_adapter(tmp_path / "a", QV)
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).symlink_to("nothing")
    refused(directory, "unreadable")
    (directory / WEIGHTS).unlink()
    os.mkfifo(directory / WEIGHTS)
    refused(directory, "unreadable", "regular")
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).mkdir()
    refused(directory, "unreadable")


@pytest.mark.parametrize(
    ("shard", "code"),
    [
        ("../x.safetensors", "outside_folder"),
        ("/etc/x.safetensors", "outside_folder"),
        ("adapter_config.json", "bad_index"),
        (3, "bad_index"),
        ("nothing.safetensors", "unreadable"),
    ],
)
def test_shard_names_are_not_trusted(tmp_path, shard, code):
    directory = write_adapter(tmp_path / "a", QV, shards=2)
    write_safetensors(tmp_path / "x.safetensors", {"a": np.ones(2)})
    index = directory / f"{WEIGHTS}.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][FIRST_B] = shard
    index.write_text(json.dumps(content))
    refused(directory, code)


def test_an_index_that_disagrees_with_its_shards(tmp_path):
    directory = write_adapter(tmp_path / "a", QV, shards=2)
    index = directory / f"{WEIGHTS}.index.json"
    whole = json.loads(index.read_text())
    missing = json.loads(index.read_text())
    del missing["weight_map"][FIRST_B]
    extra = json.loads(index.read_text())
    extra["weight_map"]["ghost"] = whole["weight_map"][FIRST_B]
    for content in (missing, extra, {}, {"weight_map": []}):
        index.write_text(json.dumps(content))
        refused(directory, "bad_index", "index.json")
    index.unlink()
    refused(directory, "bad_index", "index.json")


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_damaged_bytes_are_read_or_refused_but_never_crash(tmp_path, data):
    directory = write_adapter(tmp_path / "a", random_pairs(types=("q",), layers=range(2)))
    name = data.draw(st.sampled_from(["adapter_config.json", WEIGHTS]))
    content = bytearray((directory / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (directory / name).write_bytes(
        content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    )
    try:
        adapter = read_adapter(directory, BASE)
    except CheckpointError as error:
        assert error.code in ERROR_CODES and str(error).isprintable()
    else:
        assert all(math.isfinite(value) for value in feature_row(adapter, strict=False).values())


def test_one_pattern_a_module_is_resolved_quickly(tmp_path):
    base = BaseGeometry(60, 8, 2, 2, 4, 8, 40)
    pairs = random_pairs(rank=2, layers=range(60), base=base)
    directory = write_adapter(
        tmp_path / "a", pairs, rank_pattern=dict.fromkeys(pairs, 2), alpha_pattern=dict.fromkeys(pairs, 4)
    )
    adapter = read_adapter(directory, base)
    assert not adapter.abstains and {module.scale for module in adapter.modules} == {2.0}


def test_text_from_the_file_reaches_the_terminal_clean(tmp_path):
    directory = write_adapter(tmp_path / "a", QV, peft_type="\x1b[31mX\n" + "y" * 500)
    (found,) = [item for item in read_adapter(directory, BASE).reasons if item.code == "unsupported_type"]
    assert found.sentence.isprintable() and len(found.sentence) < 300


# --- identity ---


def test_the_content_hash_follows_what_decides_the_change(tmp_path):
    first = write_adapter(tmp_path / "a", QV)
    same = write_adapter(
        tmp_path / "b", dict(reversed(QV.items())), shards=2, base_model_name_or_path="elsewhere",
        lora_dropout=0.5, rank_pattern=None, target_modules=[f"{kind}_proj" for kind in reversed(ALL_TYPES)],
    )  # fmt: skip
    assert content_hash(first) == content_hash(same) == read_adapter(first, BASE).content_hash
    assert read_adapter(first, BASE, full=False).content_hash is None
    others = [
        write_adapter(tmp_path / "c", QV, lora_alpha=9),
        write_adapter(tmp_path / "d", QV, use_rslora=True),
        write_adapter(tmp_path / "e", QV, dtype="BF16"),
        write_adapter(tmp_path / "f", random_pairs(seed=1, types=("q", "v"))),
    ]
    assert len({content_hash(first), *map(content_hash, others)}) == 5


# --- geometry, catalogue ---


def test_geometry_from_a_transformers_config():
    config = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": None, "vocab_size": 49152,
    }  # fmt: skip
    base = BaseGeometry.from_hf_config(config, name="x")
    assert base.shapes["k"] == (192, 576) and base.shapes["down"] == (576, 1536)
    assert base.shape("qkv") == (960, 576) and base.shape("gate_up") == (3072, 576)
    for broken in ({**config, "hidden_size": "576"}, {**config, "vocab_size": 0}, {}):
        with pytest.raises(CheckpointError):
            BaseGeometry.from_hf_config(broken)


def test_modules_and_their_share_of_an_adapter():
    # The DFlash drafter of the pocket target: two layers, and fc over five taps.
    drafter = BaseGeometry(2, 576, 9, 3, 64, 1536, 49152, prefix="", fc=(576, 5 * 576))
    modules = drafter.modules()
    assert len(modules) == 2 * 7 + 1
    assert modules["fc"] == (576, 2880) and modules["layers.1.self_attn.v_proj"] == (192, 576)
    assert sum(out * into for out, into in modules.values()) == 8_736_768
    assert [round(drafter.full_over_adapter(rank), 1) for rank in (8, 16, 64)] == [45.9, 22.9, 5.7]
    # Eight layers 2560 wide at rank 64 (published: 28x).
    wide = BaseGeometry(8, 2560, 32, 8, 128, 9728, 1, fc=(2560, 5 * 2560))
    assert round(wide.full_over_adapter(64), 1) == 27.7
    target = BaseGeometry(1, 576, 9, 3, 64, 1536, 49152)
    assert list(target.modules())[:2] == [f"model.layers.0.self_attn.{kind}_proj" for kind in "qk"]


def test_every_reason_has_one_sentence_with_room_for_detail():
    for severity, sentence in REASONS.values():
        assert isinstance(severity, Severity) and sentence.count("{detail}") == 1 and sentence.endswith(".")
    assert not set(REASONS) & set(ERROR_CODES)


# --- against the libraries themselves ---


@pytest.mark.torch
@pytest.mark.parametrize("rslora", [False, True])
def test_scales_equal_those_of_peft(tmp_path, rslora):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=2, head_dim=4, vocab_size=40,
        )
    )  # fmt: skip
    config = LoraConfig(
        r=4, lora_alpha=8, use_rslora=rslora, target_modules="all-linear", task_type="CAUSAL_LM",
        rank_pattern={"q_proj": 2, r"^model.layers.[0-2].mlp.(up|gate)_proj": 3, "layers.5.mlp.down_proj": 1},
        alpha_pattern={r".*_proj": 6, "v_proj": 99},
    )  # fmt: skip
    peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)
    wanted, total = {}, 0.0
    for name, layer in peft_model.named_modules():
        if hasattr(layer, "lora_A") and "default" in layer.lora_A:
            torch.nn.init.normal_(layer.lora_B["default"].weight)
            wanted[name.removeprefix("base_model.model.")] = layer.scaling["default"]
            total += layer.get_delta_weight("default").double().square().sum().item()
    peft_model.save_pretrained(tmp_path)
    adapter = read_adapter(tmp_path, BASE)
    assert {module.name: module.scale for module in adapter.modules} == pytest.approx(wanted)
    assert feature_row(adapter)["fro_all_all"] == pytest.approx(total**0.5, rel=1e-5)


@pytest.mark.vllm
@pytest.mark.parametrize("rslora", [False, True])
def test_engine_scales_equal_those_of_vllm(tmp_path, rslora):
    from vllm.lora.peft_helper import PEFTHelper

    options = {
        "rank_pattern": {"q_proj": 4, r"layers.[0-2].mlp.(up|gate)_proj": 4},
        "alpha_pattern": {"k_proj|v_proj": 6, "layers.5.mlp.down_proj": 99},
        "use_rslora": rslora,
    }
    adapter = read_adapter(write_adapter(tmp_path / "a", **options), BASE)
    helper = PEFTHelper.from_dict(config_of(**options))
    for module in adapter.modules:
        assert module.engine_scale == helper.get_rank_and_scaling(module.name)[1]
