"""What the README claims is shown: each paragraph and each row of its tables by a test, each figure by a CSV."""

import csv
import re
from pathlib import Path

import pytest

from docs import tables

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

# {a file of tests: {what a paragraph or a row of a table says: the test that shows it}}.
CLAIMS = {
    "kernels/test_kernels.py": {
        "every mask and option composes with every other": "test_options_together",
        "`return_lse`, `return_weights`; all of it in one call": "test_options_together",
        "at most twice as far from it (1.5 times on average)": "test_an_option_alone",
        "each option and each pair": "test_each_pair_of_options_in_a_few_calls",
    },
    "test_package.py": {
        "nothing is compiled at install": "test_the_wheel_is_small_and_holds_the_packages_alone",
        "`pip install .`": "test_the_wheel_works_where_there_is_no_repository",
        "is all that knows Triton": "test_triton_is_imported_in_two_rooms",
    },
    "release/test_workflows.py": {
        "Both set themselves up in `.venv`": "test_what_they_call_is_there",
    },
    "cpu/test_kernel.py": {
        "on a CPU: those left and right of all that masks leave": "test_what_is_hidden_is_not_computed",
    },
    "call/test_plan.py": {
        "and those that they leave whole take no mask": "test_what_is_hidden_is_not_computed",
    },
    "kernels/test_contract.py": {
        "any lengths (0 included), any strides": "test_sizes_of_zero",
        "Rows that see nothing are 0, with gradient 0": "test_a_row_that_sees_nothing_is_zero_and_has_zero_gradient",
        "Run twice, a call gives the same bits": "test_run_twice_gives_the_same_bits",
    },
    "operators/test_tangent_memory.py": {
        "memory linear in the sequence": "test_on_a_cpu_it_grows_as_the_sequence_does",
    },
    "operators/test_gradcheck.py": {
        "through output, lse and weights in any combination": "test_derivatives",
    },
    "operators/test_tangent.py": {
        "forward mode (`torch.func.jvp`": "test_tangents_by_kernels",
    },
    "operators/test_derivatives.py": {
        "a block of rows at a time": "test_second_derivatives_take_rows_by_the_block",
    },
    "operators/test_transforms.py": {
        "transforms inside each other": "test_transforms",
        "and inside `torch.compile`": "test_transforms_inside_of_compiled_functions",
    },
    "test_backends.py": {
        "it never falls back": "test_one_that_is_named_runs_or_says_why_not",
    },
    "operators/test_torch.py": {
        "`torch.compile(fullgraph=True)`, export": "test_compile_whole_graph_forward_and_backward",
    },
    "kernels/test_packed.py": {
        "nothing is padded": "test_options_together",
        "the longest begin first": "test_every_block_has_one_turn_and_long_walks_come_first",
    },
    "call/test_packed.py": {
        "the host does not wait": "test_values_on_a_device_are_not_fetched",
    },
    "call/test_jagged.py": {
        "takes `torch.nested` jagged tensors too": "test_values_and_gradients",
    },
    "kernels/test_generation.py": {
        "appended to in place": "test_a_call_is_as_good_as_eager",
    },
    "kernels/test_cached.py": {
        "shared by several programs": "test_however_many_share_a_sequence_the_answer_is_the_same",
        "lengths stay on the device": "test_what_nobody_checked_is_read_and_written_inside",
    },
    "kernels/test_merge.py": {
        "`fa.merge`: attention over two sets of keys": "test_two_halves_make_the_whole",
    },
    "test_modules.py": {
        "`fa.MultiHeadAttention`, `fa.SelfAttention`, and around them": "test_it_equals_torchs_module",
    },
    "test_plot.py": {
        "`fa.plot`: pictures": "test_it_is_a_picture",
    },
    "distributed/test_methods.py": {
        "cut over the processes of torch.distributed": "test_methods_equal_one_process",
    },
    "cli/test_cli.py": {
        "`check` (this machine's backends against float64)": "test_check_compares_each_result_with_eager",
    },
    "features/test_features.py": {
        "What they answer on a CPU": "test_the_page_and_the_readme_have_what_is_kept",
    },
    "compat/test_sdpa.py": {
        "same arguments; rows that see nothing are 0": "test_values_and_gradients_are_torchs",
    },
    "compat/test_mha.py": {
        "same parameters, state dict and forward": "test_values_and_gradients_are_torchs",
        "so its replacement, has them the other way": "test_what_padding_hides_changes_no_bit_and_no_gradient",
    },
    "compat/test_convert.py": {
        "in place, sharing its parameters": "test_all_is_shared_and_nothing_is_renamed",
    },
    "compat/test_switch.py": {
        "code you cannot change that calls": "test_it_answers_every_call_with_the_arguments_of_torch",
    },
    "compat/test_silent_models.py": {
        "what does not call transformers' interface": "test_a_model_that_does_not_call_is_eager_and_says_so_once",
    },
    "compat/test_models.py": {
        "masks, caches, softcap, sinks, position bias": "test_logits_loss_and_gradients_are_eagers",
    },
    "compat/test_flash_attn.py": {
        "flash-attn 2's signatures": "test_signatures_are_flash_attns",
    },
    "compat/test_flash_install.py": {
        "`install` refuses where the real one is installed": "test_install_refuses_where_the_real_one_is",
    },
    "test_layers.py": {
        '`backend="naive"` is the textbook\'s computation': "test_a_textbook_encoder_layer",
    },
    "kernels/test_options.py": {
        "Dropout drops the same weights on every path": "test_dropout_keeps_the_same_weights_on_every_path",
    },
    "launch/test_backward.py": {
        "kernels add it up in whatever order they come": "test_in_which_order_programs_run_is_seen_in_dq_alone",
    },
    "cli/test_bench.py": {
        "ends with the answer in words": "test_json_has_every_row_and_the_verdict",
        "runs out of memory, is a row that says so": "test_out_of_memory_is_a_row",
    },
    "bench/test_report.py": {
        "a difference that noise may have made has no number": "test_noise_is_no_verdict",
    },
    "cli/test_tune.py": {
        "to hold tiles of the kernels to float64 there": "test_a_mistake_costs_its_candidate_and_nothing_else",
        "run again, it goes on": "test_a_second_run_goes_on_and_keeps_what_it_does_not_ask_for",
    },
    "launch/test_tuned.py": {
        "on this GPU, driver, torch, Triton and version": "test_a_file_is_about_the_gpu_and_all_versions",
    },
    "cli/test_warmup.py": {
        "compiles them ahead": "test_the_command_compiles_each_pass_of_each_shape",
    },
    "test_claims.py": {
        "you get the speed of PyTorch's fused kernel": "test_times_on_a_cpu",
        "with half of the keys padding": "test_times_on_a_cpu",
        "times the speed of cuDNN's forward": "test_speeds_on_a_gpu",
    },
    "offline/test_compile.py": {
        "registers, spills and tensor-core instructions counted": "test_a_kernel_is_within_its_budget",
    },
    "ptx/test_calls.py": {
        "executed on a CPU that watches its memory": "test_a_call_by_its_compiled_kernels",
    },
    "bench/test_gpu_sh.py": {
        "tests and times everything in one command": "test_without_a_gpu_it_is_a_rehearsal",
    },
    "test_examples.py": {
        "seven short programs that check what they show": "test_what_it_shows_is_true",
    },
    "docs/test_pages.py": {
        "`make docs` builds the site": "test_the_reference_has_every_public_name",
    },
    "test_readme.py": {
        "is one page: the rooms": "test_the_rooms_of_the_architecture_are_there",
    },
}
NOT_CLAIMS = "you have"  # heads of tables


def flat(text):
    return " ".join(text.split())


@pytest.mark.parametrize("file", CLAIMS)
def test_it_is_said_and_its_test_is_there(file):
    tests = (ROOT / "tests" / file).read_text()
    for claim, name in CLAIMS[file].items():
        assert claim in flat(README), f"the README does not say: {claim}"
        assert re.search(rf"^def {name}\(", tests, re.M), f"there is no {name} in {file}"


def said():
    """Paragraphs, and rows of tables, less code, pictures, headings and the table that tests write."""
    text = re.sub(r"<!-- features: .*?(?=\n## )", "", README, flags=re.S)
    text = re.sub(r"```.*?```|^    .*$|^!\[.*$|^#.*$|^\|[-|]*\|$", "", text, flags=re.S | re.M)
    for block in re.split(r"\n\s*\n", text):
        rows = block.strip().splitlines() if block.strip().startswith("|") else [block]
        yield from (flat(row) for row in rows if re.search(r"\w", row))


def test_nothing_is_said_that_no_test_shows():
    claims = [claim for some in CLAIMS.values() for claim in some]
    for row in said():
        assert any(claim in row for claim in claims) or NOT_CLAIMS in row, row


def cells():
    """{(mode, dtype, sizes, causal, options): {provider: row}} of cpu.csv."""
    found = {}
    with (ROOT / "bench/results/cpu.csv").open() as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in ("mode", "dtype", "B", "Hq", "Hkv", "Sq", "Sk", "D", "causal", "options"))
            found.setdefault(key, {})[row["provider"]] = row
    return {key: some for key, some in found.items() if {"fusedattn:cpu", "sdpa"} <= some.keys()}


def ratios(words):
    """Time over that of sdpa of cells with some options, for any number of threads."""
    for key, some in cells().items():
        if re.sub(r" ?threads=\d", "", key[-1]) == words and int(key[5]) >= 128:
            yield float(some["fusedattn:cpu"]["ms_p50"]) / float(some["sdpa"]["ms_p50"])


def numbers(pattern):
    return [float(x) for x in re.search(pattern, flat(README)).groups()]


def test_speeds_on_a_gpu():
    pairs = [(place, ours.tflops / theirs.tflops) for place, _, ours, theirs in tables.gpu_pairs()]
    for mode, pattern in (
        ("forward", r"([\d.]+) to ([\d.]+) times the speed of cuDNN's forward"),
        ("backward", r"([\d.]+) to ([\d.]+) times that of its backward"),
    ):
        found = sorted((ratio, place) for place, ratio in pairs if place[0] == mode)
        assert [round(found[0][0], 2), round(found[-1][0], 2)] == numbers(pattern)
        assert found[0][1][3] == 512, "the least is of the shortest"
    long = [ratio for (mode, _, _, length), ratio in pairs if mode == "backward" and length >= 4096]
    assert [round(min(long), 2), round(max(long), 2)] == numbers(r"([\d.]+) to ([\d.]+) from 4096 tokens on")
    least = [
        ratio
        for (mode, dim, causal, length), ratio in pairs
        if mode == "forward" and causal and dim > 64 and length >= 4096
    ]
    assert len(least) == 6 and min(least) > 1


def test_times_on_a_cpu():
    (most,) = numbers(r"at most ([\d.]+) times its time in each cell")
    assert len(list(ratios(""))) >= 40 and max(ratios("")) <= most
    for words, pattern in (
        ("keys=0.5", r"([\d.]+) to ([\d.]+) of it with half of the keys padding"),
        ("window=64,0", r"([\d.]+) to ([\d.]+) with a window of 64 in 512"),
    ):
        found = sorted(ratios(words))
        assert [round(found[0], 2), round(found[-1], 2)] == numbers(pattern)
