//! What a model writes, in every family's parser: read the same whole and in pieces, and never lost.
//!
//! The first bytes choose parser and cuts, the rest is the text.

#![no_main]

use std::sync::Arc;

use kvist_text::{AnswerParser, Calls, OfferedTool, Parsing, Piece, Pieces, PromptEnd, ReasoningFamily, ToolFamily};
use libfuzzer_sys::fuzz_target;

/// What the pieces say, put together.
#[derive(Debug, Default, PartialEq, Eq)]
struct Said {
    reasoning: String,
    text: String,
    calls: Vec<(String, String, bool)>,
    failures: u32,
}

fn read<'a>(parsing: &Parsing, parts: impl IntoIterator<Item = &'a str>) -> Said {
    let mut parser = AnswerParser::new(parsing);
    let (mut pieces, mut said) = (Pieces::default(), Said::default());
    let mut take = |pieces: &mut Pieces| {
        for piece in pieces.drain() {
            match piece {
                Piece::Text(text) => said.text.push_str(&text),
                Piece::Reasoning(text) => said.reasoning.push_str(&text),
                Piece::CallStart { name } => said.calls.push((name, String::new(), false)),
                Piece::Arguments(json) => said.calls.last_mut().expect("arguments follow a call").1.push_str(&json),
                Piece::CallEnd => said.calls.last_mut().expect("an end follows a call").2 = true,
            }
        }
        said.failures = pieces.failures();
    };
    for part in parts {
        parser.feed(part, &mut pieces);
        take(&mut pieces);
    }
    parser.finish(&mut pieces);
    take(&mut pieces);
    said
}

fn parsing_of(choice: u8, thoughts: u8) -> Parsing {
    let text = serde_json::json!({"properties": {"city": {"type": "string"}}});
    let tools: Arc<[OfferedTool]> = ["get_weather", "f"].map(|name| OfferedTool::new(name, &text)).into();
    let families = ToolFamily::ALL;
    let calls = match families.get(usize::from(choice) % (families.len() + 3)) {
        Some((_, family)) => Calls::Free { family: *family, tools },
        None if choice % 3 == 0 => Calls::None,
        None if choice % 3 == 1 => Calls::List,
        None => Calls::Named("f".to_owned()),
    };
    let families = ReasoningFamily::ALL;
    let reasoning = families.get(usize::from(thoughts) % (families.len() + 1)).map(|(_, family)| *family);
    Parsing { reasoning, prompt_end: PromptEnd::Plain, calls }
}

/// Cuts after about so many bytes, at borders of characters.
fn cut(text: &str, length: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let end = (length..rest.len()).find(|end| rest.is_char_boundary(*end)).unwrap_or(rest.len());
        let (part, behind) = rest.split_at(end);
        rest = behind;
        (!part.is_empty()).then_some(part)
    })
}

fuzz_target!(|bytes: &[u8]| {
    let [choice, thoughts, length, text @ ..] = bytes else { return };
    let text = String::from_utf8_lossy(text);
    let parsing = parsing_of(*choice, *thoughts);
    let whole = read(&parsing, [&*text]);
    assert_eq!(whole, read(&parsing, cut(&text, usize::from(*length % 8) + 1)), "{parsing:?}");
});
