"""The committed directory is a model: Transformers and PEFT load it as it lies there."""

from __future__ import annotations

import os

import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from hf_kit import run_script

import holdfast as hf
from holdfast.accelerate import Checkpointer
from holdfast.transformers import HoldfastCallback, model_files

# PEFT calls what Transformers deprecates, and looks for extensions of CUDA.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
]
DECODER = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**DECODER, "num_key_value_heads": 2}
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ARCHITECTURES = {
    "GPT2LMHeadModel": {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 99, "n_positions": 64},
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": GROUPED,
    "Qwen2ForCausalLM": {**GROUPED, "tie_word_embeddings": True},
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 8},
    "GemmaForCausalLM": {**GROUPED, "head_dim": 8},
    "Gemma2ForCausalLM": {**GROUPED, "head_dim": 8},
    "PhiForCausalLM": DECODER,
    "Phi3ForCausalLM": GROUPED,
    "GPTNeoXForCausalLM": DECODER,
    "OPTForCausalLM": {**SEQ2SEQ, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2,
                       "num_attention_heads": 4},
    "BloomForCausalLM": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99},
    "FalconForCausalLM": DECODER,
    "MptForCausalLM": {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 99, "max_seq_len": 64},
    "StableLmForCausalLM": GROUPED,
    "OlmoForCausalLM": DECODER,
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4},
    "Qwen2MoeForCausalLM": {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 16},
    "DeepseekV3ForCausalLM": {**DECODER, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
                              "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "q_lora_rank": 16,
                              "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
                              "first_k_dense_replace": 1},
    "BertForMaskedLM": DECODER,
    "RobertaForMaskedLM": DECODER,
    "DistilBertForMaskedLM": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 99},
    "AlbertForMaskedLM": {**DECODER, "embedding_size": 16},
    "ElectraForMaskedLM": {**DECODER, "embedding_size": 16},
    "DebertaV2ForMaskedLM": DECODER,
    "ModernBertForMaskedLM": DECODER,
    "T5ForConditionalGeneration": {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8,
                                   "vocab_size": 99, "decoder_start_token_id": 0},
    "BartForConditionalGeneration": SEQ2SEQ,
    "MarianMTModel": {**SEQ2SEQ, "pad_token_id": 98, "decoder_start_token_id": 98},
    "WhisperForConditionalGeneration": {**SEQ2SEQ, "max_source_positions": 50, "max_target_positions": 32,
                                        "num_mel_bins": 16, "suppress_tokens": None, "begin_suppress_tokens": None},
    "ViTForImageClassification": VISION,
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
                                     "layer_type": "basic"},
    "CLIPModel": {"text_config": {**DECODER, "max_position_embeddings": 32}, "vision_config": VISION,
                  "projection_dim": 16},
    "Wav2Vec2ForCTC": {**DECODER, "vocab_size": 32, "conv_dim": [16, 16], "conv_stride": [5, 2],
                       "conv_kernel": [10, 3], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
                       "num_conv_pos_embedding_groups": 2},
    "MambaForCausalLM": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 8},
}  # fmt: skip
LAYERS = ["q_proj", "v_proj"]
ADAPTERS = {
    "lora": peft.LoraConfig(r=4, target_modules=LAYERS),
    "lora and a whole layer": peft.LoraConfig(r=4, target_modules=LAYERS, modules_to_save=["lm_head"]),
    "dora": peft.LoraConfig(r=4, target_modules=LAYERS, use_dora=True),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": peft.LoHaConfig(r=4, target_modules=LAYERS),
    "lokr": peft.LoKrConfig(r=4, target_modules=LAYERS),
    "adalora": peft.AdaLoraConfig(init_r=4, target_r=2, total_step=100, target_modules=LAYERS),
    "vera": peft.VeraConfig(r=4, target_modules=LAYERS),
    "vblora": peft.VBLoRAConfig(r=4, num_vectors=8, vector_length=8, target_modules=LAYERS),
}


def made(name, **changes):
    """A small model with random weights that no initialisation of the library gives."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**ARCHITECTURES[name], **changes}))
    randomise(model)
    return model.eval()


def randomise(model):
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)


def assert_same(found, model):
    expected, stored = model.state_dict(), found.state_dict()
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    assert {name: tensor.dtype for name, tensor in stored.items()} == {n: t.dtype for n, t in expected.items()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_from_pretrained_takes_the_checkpoint(tmp_path, name):
    """Weights bitwise, types too, nothing missing and nothing unexpected; each tensor is written once."""
    model = made(name)
    saved = hf.save(tmp_path / "a", {"model": model, "step": 1}, model_files=model_files(model))
    found, info = type(model).from_pretrained(saved.path, output_loading_info=True)
    assert_same(found, model)
    assert not {kind: names for kind, names in info.items() if names}
    stored = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}
    files = [entry for entry in saved.manifest.files if entry.role == "tensors"]
    assert sum(entry.size for entry in files) < sum(stored.values()) + 64 * 1024
    assert saved.verify().ok


def test_auto_classes_and_generation(tmp_path):
    """`AutoModel...` finds the class and how to generate; logits are those of the trained model."""
    model = made("LlamaForCausalLM")
    model.generation_config.max_new_tokens = 7
    saved = hf.save(tmp_path / "a", {"model": model}, model_files=model_files(model))
    found = transformers.AutoModelForCausalLM.from_pretrained(saved.path).eval()
    assert found.generation_config.max_new_tokens == 7
    tokens = torch.arange(3, 13)[None]
    assert torch.equal(found(tokens).logits, model(tokens).logits)


def test_a_reader_gets_the_type_that_was_trained(tmp_path):
    """bfloat16 weights come back as bfloat16 without a word, because config.json says so."""
    model = made("LlamaForCausalLM").to(torch.bfloat16)
    saved = hf.save(tmp_path / "a", {"model": model}, model_files=model_files(model))
    found = transformers.AutoModelForCausalLM.from_pretrained(saved.path)
    assert found.dtype == torch.bfloat16
    assert_same(found, model)


def test_a_run_whose_base_is_frozen(tmp_path):
    """Frozen tensors lie in a file that checkpoints share; each checkpoint loads as what it was."""
    model = made("GPT2LMHeadModel")
    for parameter in model.transformer.h[0].parameters():
        parameter.requires_grad_(False)
    seen = []
    files = model_files(model)
    with hf.Checkpointer(tmp_path, {"model": model}, every=1, keep=None, model_files=files) as ck:
        for step in range(3):
            with torch.no_grad():
                model.transformer.h[1].mlp.c_fc.weight.fill_(step)
            seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            ck.step()
    for checkpoint, expected in zip(reversed(ck.checkpoints()), seen, strict=True):
        found = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.path).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_tokenizer_lies_beside_it(tmp_path):
    """Whatever the tokenizer's own save_pretrained writes is committed too, and loads from there."""
    tokenizers = pytest.importorskip("tokenizers")
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?")
    model = made("GPT2LMHeadModel")
    saved = hf.save(tmp_path / "a", {"model": model}, model_files=model_files(model, tokenizer))
    assert transformers.AutoTokenizer.from_pretrained(saved.path)("a b c").input_ids == [0, 1, 2]


def test_two_models_in_two_folders(tmp_path):
    """`folder=` keeps the files of several models apart; `subfolder=` of Transformers finds each."""
    first, second = made("BertForMaskedLM"), made("GPT2LMHeadModel")
    one, two = model_files(first, item="first", folder="first"), model_files(second, item="second", folder="second")
    files = hf.ModelFiles(files={**one.files, **two.files}, indexes={**one.indexes, **two.indexes})
    saved = hf.save(tmp_path / "a", {"first": first, "second": second}, model_files=files)
    assert_same(transformers.BertForMaskedLM.from_pretrained(saved.path, subfolder="first"), first)
    assert_same(transformers.GPT2LMHeadModel.from_pretrained(saved.path, subfolder="second"), second)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_of_peft(tmp_path, kind):
    """The adapter alone is in adapter_model.safetensors, the base in a shared file; logits are bitwise the same."""
    model = peft.get_peft_model(made("LlamaForCausalLM"), ADAPTERS[kind])
    randomise(model)
    model.eval()
    saved = hf.save(tmp_path / "a", {"model": model}, model_files=model_files(model))
    found = peft.PeftModel.from_pretrained(made("LlamaForCausalLM"), saved.path).eval()
    tokens = torch.arange(3, 13)[None]
    assert torch.equal(found(tokens).logits, model(tokens).logits)
    assert os.path.getsize(os.path.join(saved.path, "adapter_model.safetensors")) < 32 * 1024
    again = peft.get_peft_model(made("LlamaForCausalLM"), ADAPTERS[kind])
    hf.load(saved, {"model": again})
    assert_same(again, model)


def test_what_cannot_be_is_refused(tmp_path):
    """A computed adapter, and a model of another library, name what to do instead."""
    prompts = peft.get_peft_model(
        made("LlamaForCausalLM"), peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    )
    with pytest.raises(hf.ConfigError, match="its own save_pretrained"):
        model_files(prompts)
    with pytest.raises(hf.ConfigError, match="no model of transformers or PEFT"):
        model_files(torch.nn.Linear(2, 2))


def loop_trainer(model, folder, **options):
    """A training of a language model by the loop trainer, of two batches."""
    torch.manual_seed(0)
    tokens = torch.randint(3, 99, (8, 12))
    return hf.Trainer(
        model=model, optimizers=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2),
        loss_fn=lambda outputs, targets: torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
        ),
        train_dataloader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens, tokens), batch_size=4),
        max_duration="2ba", save_interval="1ba", save_folder=folder, save_filename="ba{batch}", progress_bar=False,
        **options,
    )  # fmt: skip


def test_a_loop_trainer_writes_models(tmp_path):
    """`from_pretrained` takes each directory, tied weights included, and training goes on from it."""
    model = made("Qwen2ForCausalLM")
    with loop_trainer(model, tmp_path, model_files=model_files(model)) as trainer:
        trainer.fit()
    found, info = type(model).from_pretrained(trainer.saved_checkpoints[-1], output_loading_info=True)
    assert_same(found, model)
    assert not {kind: names for kind, names in info.items() if names}
    other = made("Qwen2ForCausalLM")
    loop_trainer(other, None, load_path=trainer.saved_checkpoints[0])
    assert_same(type(model).from_pretrained(trainer.saved_checkpoints[0]), other)


def test_a_loop_trainer_writes_adapters(tmp_path):
    """PEFT takes the adapter of a directory; the frozen base is beside it for a resume."""
    model = peft.get_peft_model(made("LlamaForCausalLM"), ADAPTERS["lora"])
    randomise(model)
    with loop_trainer(model, tmp_path, model_files=model_files(model)) as trainer:
        trainer.fit()
    found = peft.PeftModel.from_pretrained(made("LlamaForCausalLM"), trainer.saved_checkpoints[-1])
    tokens = torch.arange(3, 13)[None]
    assert torch.equal(found.eval()(tokens).logits, model.eval()(tokens).logits)


def test_a_wrapped_model_of_a_loop_trainer(tmp_path):
    """The item may be a module within the model that is trained."""

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm = made("LlamaForCausalLM")

        def forward(self, tokens):
            return self.lm(tokens)

    model = Wrapped()
    with loop_trainer(model, tmp_path, model_files=model_files(model.lm, item="model/lm")) as trainer:
        trainer.fit()
    assert_same(type(model.lm).from_pretrained(trainer.saved_checkpoints[-1]), model.lm)


def test_weights_that_fsdp2_has_cut(tmp_path):
    """Two ranks train a model whose layers are cut over them: each checkpoint of the run loads, bit by bit."""
    assert run_script("sharded_model.py", {"folder": str(tmp_path)}, ranks=2) == 0
    trained = torch.load(tmp_path / "weights.pt")
    for step in (2, 4):
        folder = tmp_path / f"run/step_{step:08d}"
        found, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in trained[step].items())
        assert not {kind: names for kind, names in info.items() if names}
        assert hf.Checkpoint(folder).verify(deep=True).ok


def test_a_checkpointer_of_accelerate_writes_models(tmp_path):
    """`model_files` goes through; the newest checkpoint, by the run's link, is the model."""
    accelerator = Accelerator(cpu=True)
    model = made("LlamaForCausalLM").train()
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    files = model_files(accelerator.unwrap_model(prepared))
    tokens = torch.arange(3, 13)[None]
    with Checkpointer(tmp_path / "run", accelerator, every=2, model_files=files) as ck:
        while ck.global_step < 2:
            accelerator.backward(prepared(tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            ck.step()
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "latest"), model)


def test_what_a_trainer_saves_is_a_model_as_it_lies_there(tmp_path):
    """`HoldfastCallback` keeps directories that Transformers wrote: they need no more files."""
    model = made("GPT2LMHeadModel").train()
    rows = [{"input_ids": torch.arange(3, 11), "labels": torch.arange(3, 11)} for _ in range(4)]
    callback = HoldfastCallback(tmp_path / "run")
    arguments = transformers.TrainingArguments(
        tmp_path / "out", max_steps=2, save_steps=2, save_total_limit=1, use_cpu=True, report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(callback.checkpoints()[0].path), model)
