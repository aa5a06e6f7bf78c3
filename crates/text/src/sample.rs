//! A byte-level tokenizer with ChatML, for tests.

use crate::{ModelText, TextHeader};

fn characters() -> Vec<char> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 256;
    (0u8..=255)
        .map(|byte| {
            if printable(byte) {
                char::from(byte)
            } else {
                next += 1;
                char::from_u32(next - 1).unwrap()
            }
        })
        .collect()
}

pub(crate) fn byte_token(byte: u8) -> u32 {
    u32::from(byte)
}

pub(crate) fn model() -> ModelText {
    let vocabulary: serde_json::Map<String, serde_json::Value> =
        characters().into_iter().enumerate().map(|(id, character)| (character.to_string(), id.into())).collect();
    let added = |id: u32, content: &str| serde_json::json!({"id": id, "content": content, "special": true, "normalized": false, "single_word": false, "lstrip": false, "rstrip": false});
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(256, "<|im_start|>"), added(257, "<|im_end|>")],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": []},
    });
    let chat_template = "{% for message in messages %}{% if message.role == 'alien' %}{{ raise_exception('unknown role') }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let header = TextHeader {
        chat_template: chat_template.to_owned(),
        eos_token: "<|im_end|>".to_owned(),
        eos_token_ids: vec![257],
        ..TextHeader::default()
    };
    ModelText::load(json.to_string().as_bytes(), header).unwrap()
}
