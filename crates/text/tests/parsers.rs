//! Each parser on what models of its family write: whole, in pieces cut at every place, and damaged.
#![allow(clippy::unwrap_used, reason = "functions beside the tests")]

use std::sync::Arc;

use kvist_text::{AnswerParser, Calls, OfferedTool, Parsing, Piece, Pieces, PromptEnd, ReasoningFamily, ToolFamily};
use proptest::prelude::*;
use serde_json::json;

/// What the pieces say, put together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Said {
    reasoning: String,
    text: String,
    /// Name, arguments, whether they are complete.
    calls: Vec<(String, String, bool)>,
    failures: u32,
}

impl Said {
    fn take(&mut self, pieces: &mut Pieces) {
        for piece in pieces.drain() {
            match piece {
                Piece::Text(text) => self.text.push_str(&text),
                Piece::Reasoning(text) => self.reasoning.push_str(&text),
                Piece::CallStart { name } => self.calls.push((name, String::new(), false)),
                Piece::Arguments(json) => self.calls.last_mut().unwrap().1.push_str(&json),
                Piece::CallEnd => self.calls.last_mut().unwrap().2 = true,
            }
        }
        self.failures = pieces.failures();
    }
}

fn read<'a>(parsing: &Parsing, parts: impl IntoIterator<Item = &'a str>) -> Said {
    let mut parser = AnswerParser::new(parsing);
    let (mut pieces, mut said) = (Pieces::default(), Said::default());
    for part in parts {
        parser.feed(part, &mut pieces);
        said.take(&mut pieces);
    }
    parser.finish(&mut pieces);
    said.take(&mut pieces);
    said
}

fn tools() -> Arc<[OfferedTool]> {
    let weather = json!({"properties": {"city": {"type": "string"}, "days": {"type": "array"}}});
    let add = json!({"properties": {"a": {"type": "integer"}, "note": {"type": "string"}}});
    [("get_weather", weather), ("add", add), ("f", json!({}))]
        .map(|(name, schema)| OfferedTool::new(name, &schema))
        .into()
}

fn free(family: ToolFamily) -> Parsing {
    Parsing { calls: Calls::Free { family, tools: tools() }, ..Parsing::default() }
}

fn thinking(family: ReasoningFamily, prompt_end: PromptEnd) -> Parsing {
    Parsing { reasoning: Some(family), prompt_end, ..Parsing::default() }
}

struct Fixture {
    parsing: Parsing,
    written: &'static str,
    said: Said,
}

type Call = (&'static str, &'static str, bool);

fn fixture(
    parsing: Parsing,
    written: &'static str,
    reasoning: &'static str,
    text: &'static str,
    calls: &[Call],
) -> Fixture {
    let calls = calls.iter().map(|(name, json, ended)| ((*name).into(), (*json).into(), *ended)).collect();
    Fixture { parsing, written, said: Said { reasoning: reasoning.into(), text: text.into(), calls, failures: 0 } }
}

/// What looked like a call and is none: all of it is text, and it counts.
fn failing(parsing: Parsing, written: &'static str) -> Fixture {
    let mut failing = fixture(parsing, written, "", written, &[]);
    failing.said.failures = 1;
    failing
}

const TOKYO: Call = ("get_weather", r#"{"city": "東京", "days": [1, 2]}"#, true);
const SUM: Call = ("add", r#"{"a": 1, "b": {"c": "}</tool_call>\" [ARGS]"}}"#, true);
const NOTHING: Call = ("f", "{}", true);

fn hermes() -> Vec<Fixture> {
    let hermes = || free(ToolFamily::Hermes);
    let qwen = || Parsing { reasoning: Some(ReasoningFamily::Qwen3), ..hermes() };
    vec![
        fixture(hermes(), "With <tool and a < b.\n", "", "With <tool and a < b.\n", &[]),
        fixture(
            hermes(),
            "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"東京\", \"days\": [1, 2]}}\n</tool_call>",
            "",
            "",
            &[TOKYO],
        ),
        fixture(
            qwen(),
            concat!(
                "<think>\nI need both.\n\nYes.\n</think>\n\n<tool_call>\n",
                r#"{"name": "get_weather", "arguments": {"city": "東京", "days": [1, 2]}}"#,
                "\n</tool_call>\n<tool_call>\n",
                r#"{"name": "add", "arguments": {"a": 1, "b": {"c": "}</tool_call>\" [ARGS]"}}}"#,
                "\n</tool_call>",
            ),
            "I need both.\n\nYes.",
            "",
            &[TOKYO, SUM],
        ),
        fixture(qwen(), "I look.\n<tool_call>{\"name\": \"f\"}</tool_call>\nDone.", "", "I look.\n\nDone.", &[NOTHING]),
        fixture(
            hermes(),
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"cut he",
            "",
            "",
            &[("f", "{\"a\": \"cut he", false)],
        ),
        fixture(hermes(), "Hm <tool_call>\n{\"na", "", "Hm <tool_call>\n{\"na", &[]),
        failing(hermes(), "<tool_call>\nno JSON\n</tool_call> and on"),
        failing(hermes(), "<tool_call>{\"x\": 1}</tool_call>"),
    ]
}

fn llama() -> Vec<Fixture> {
    let llama = || free(ToolFamily::Llama3Json);
    vec![
        fixture(
            llama(),
            r#"{"name": "get_weather", "parameters": {"city": "東京", "days": [1, 2]}}"#,
            "",
            "",
            &[TOKYO],
        ),
        fixture(
            llama(),
            r#"<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": "1"}}"#,
            "",
            "",
            &[("f", r#"{"x": "1"}"#, true)],
        ),
        fixture(
            llama(),
            r#"{"name": "f", "parameters": {}}; {"name": "add", "parameters": {"a": 1}}"#,
            "",
            "",
            &[NOTHING, ("add", r#"{"a": 1}"#, true)],
        ),
        // An answer in JSON is no call, though it has a name.
        fixture(llama(), r#"{"name": "Ada", "age": 36}"#, "", r#"{"name": "Ada", "age": 36}"#, &[]),
        fixture(llama(), r#"{"city": "Paris"}"#, "", r#"{"city": "Paris"}"#, &[]),
        fixture(llama(), "Hello {world}", "", "Hello {world}", &[]),
        fixture(llama(), r#"{"name": "f", "parameters": {"x""#, "", "", &[("f", r#"{"x""#, false)]),
    ]
}

fn mistral() -> Vec<Fixture> {
    let mistral = || free(ToolFamily::Mistral);
    let magistral = Parsing { reasoning: Some(ReasoningFamily::Mistral), ..mistral() };
    vec![
        fixture(
            mistral(),
            concat!(
                r#"[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "東京", "days": [1, 2]}, "#,
                r#""id": "9Ae3bDc2F"}, {"name": "f", "arguments": {}}]"#
            ),
            "",
            "",
            &[TOKYO, NOTHING],
        ),
        fixture(
            mistral(),
            concat!(
                r#"[TOOL_CALLS]get_weather[ARGS]{"city": "東京", "days": [1, 2]}"#,
                "[TOOL_CALLS]f[CALL_ID]VvvODy9mT[ARGS]{}"
            ),
            "",
            "",
            &[TOKYO, NOTHING],
        ),
        fixture(mistral(), r#"Sure.[TOOL_CALLS]f{"x": 1}"#, "", "Sure.", &[("f", r#"{"x": 1}"#, true)]),
        fixture(
            magistral,
            "[THINK]Weather?[/THINK]I look.[TOOL_CALLS]f[ARGS]{\"x\": [",
            "Weather?",
            "I look.",
            &[("f", "{\"x\": [", false)],
        ),
        fixture(mistral(), "[1, 2] and [TOOL", "", "[1, 2] and [TOOL", &[]),
        failing(mistral(), "[TOOL_CALLS] [1]"),
    ]
}

fn deepseek() -> Vec<Fixture> {
    let v3 = || free(ToolFamily::DeepSeekV3);
    let r1 = Parsing { reasoning: Some(ReasoningFamily::DeepSeekR1), ..v3() };
    let v31 = || free(ToolFamily::DeepSeekV31);
    vec![
        fixture(
            v3(),
            concat!(
                "Let me see.\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n",
                r#"{"city": "東京", "days": [1, 2]}"#,
                "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```",
                "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ),
            "",
            "Let me see.\n\n",
            &[TOKYO, NOTHING],
        ),
        fixture(
            r1,
            concat!(
                "Thoughts without a mark.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n",
                "```json\n{\"x\": 1",
            ),
            "Thoughts without a mark.",
            "",
            &[("f", "{\"x\": 1", false)],
        ),
        fixture(
            v31(),
            concat!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>",
                r#"{"city": "東京", "days": [1, 2]}"#,
                "<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ),
            "",
            "",
            &[TOKYO, NOTHING],
        ),
        fixture(v31(), "a <｜tool b", "", "a <｜tool b", &[]),
        failing(v3(), "<｜tool▁call▁begin｜>thing<｜tool▁sep｜>x"),
    ]
}

fn gpt_oss() -> Vec<Fixture> {
    let harmony = || Parsing { reasoning: Some(ReasoningFamily::GptOss), ..free(ToolFamily::GptOss) };
    vec![
        fixture(
            harmony(),
            concat!(
                "<|channel|>analysis<|message|>User asks.\nI think.<|end|>",
                "<|start|>assistant<|channel|>final<|message|> It is 20 °C.<|return|>",
            ),
            "User asks.\nI think.",
            " It is 20 °C.",
            &[],
        ),
        // The token that ends the answer never arrives.
        fixture(
            harmony(),
            concat!(
                "<|channel|>analysis<|message|>Call.<|end|><|start|>assistant<|channel|>commentary ",
                "to=functions.get_weather <|constrain|>json<|message|>",
                r#"{"city": "東京", "days": [1, 2]}"#,
            ),
            "Call.",
            "",
            &[TOKYO],
        ),
        fixture(
            harmony(),
            concat!(
                "<|channel|>commentary<|message|>First the sum.<|end|>",
                "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>",
                r#"{"a": 1, "b": {"c": "}</tool_call>\" [ARGS]"}}"#,
                "<|call|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{\"x",
            ),
            "",
            "First the sum.",
            &[SUM, ("f", "{\"x", false)],
        ),
        fixture(harmony(), "<|channel|>analysis<|message|>cut in thoug", "cut in thoug", "", &[]),
        failing(harmony(), "No head at all."),
    ]
}

fn thoughts() -> Vec<Fixture> {
    use PromptEnd::{BehindThoughts, Constrained, InThoughts, Plain};
    let qwen = |end| thinking(ReasoningFamily::Qwen3, end);
    let r1 = |end| thinking(ReasoningFamily::DeepSeekR1, end);
    vec![
        fixture(qwen(Plain), "<think>\na <b\n</think>\n\nc</think>", "a <b", "c</think>", &[]),
        fixture(qwen(Plain), "\nNo thoughts <think>", "", "\nNo thoughts <think>", &[]),
        fixture(qwen(Plain), "<think>\n\n</think>\n\nx", "", "x", &[]),
        fixture(qwen(InThoughts), "a\n</think>\n\nb", "a", "b", &[]),
        fixture(qwen(BehindThoughts), "<think>", "", "<think>", &[]),
        fixture(qwen(Constrained), r#"{"a": 1}"#, "", r#"{"a": 1}"#, &[]),
        fixture(r1(Plain), "a\n\n</think>b", "a", "b", &[]),
        fixture(r1(Plain), "<think>\na\n</think>b ", "a", "b ", &[]),
        fixture(r1(Constrained), r#"{"a": 1}"#, "", r#"{"a": 1}"#, &[]),
        fixture(r1(Plain), "never ends </thin", "never ends </thin", "", &[]),
        fixture(thinking(ReasoningFamily::Kimi, Plain), "◁think▷a◁/think▷b", "a", "b", &[]),
        fixture(thinking(ReasoningFamily::SeedOss, Plain), "<seed:think>a</seed:think>b", "a", "b", &[]),
    ]
}

fn experimental() -> Vec<Fixture> {
    vec![
        fixture(
            free(ToolFamily::KimiK2),
            concat!(
                "Ok<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>",
                r#"{"city": "東京", "days": [1, 2]}"#,
                "<|tool_call_end|><|tool_calls_section_end|>",
            ),
            "",
            "Ok",
            &[TOKYO],
        ),
        fixture(
            free(ToolFamily::Granite),
            r#"<|tool_call|>[{"name": "get_weather", "arguments": {"city": "東京", "days": [1, 2]}}]"#,
            "",
            "",
            &[TOKYO],
        ),
    ]
}

fn tagged() -> Vec<Fixture> {
    // A call that has a name and cannot be read further stays open; what is left is text, and it counts.
    let broken = |parsing, written, rest| {
        let mut broken = fixture(parsing, written, "", rest, &[("f", "{", false)]);
        broken.said.failures = 1;
        broken
    };
    let coder = || free(ToolFamily::Qwen3Coder);
    let glm = || free(ToolFamily::Glm);
    // Digits of a text stay a text, and what no schema speaks of is what it looks like.
    let noted: Call = ("add", r#"{"a": 7, "note": "12", "more": true, "free": "two words"}"#, true);
    vec![
        fixture(
            coder(),
            concat!(
                "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n東京\n</parameter>\n",
                "<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call>\n",
                "<tool_call>\n<function=f>\n</function>\n</tool_call>",
            ),
            "",
            "I look.\n",
            &[TOKYO, NOTHING],
        ),
        fixture(
            coder(),
            concat!(
                "<tool_call><function=add><parameter=a>7</parameter><parameter=note>12</parameter>",
                "<parameter=more>true</parameter><parameter=free>two words</parameter></function></tool_call>",
            ),
            "",
            "",
            &[noted],
        ),
        fixture(
            coder(),
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n\n a\n</b>\n\n</parameter>\n</function>\n</tool_call>",
            "",
            "",
            &[("get_weather", r#"{"city": "\n a\n</b>\n"}"#, true)],
        ),
        failing(coder(), "<tool_call>\n<function=>\n</function>\n</tool_call>"),
        failing(coder(), r#"<tool_call>{"name": "f"}</tool_call>"#),
        broken(coder(), "<tool_call><function=f><parameter=x>1</function></tool_call>", "<parameter=x>1</function>"),
        fixture(coder(), "a < b and <tool", "", "a < b and <tool", &[]),
        fixture(
            glm(),
            concat!(
                "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>東京</arg_value>\n",
                "<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call><tool_call>f</tool_call>",
            ),
            "",
            "I look.\n",
            &[TOKYO, NOTHING],
        ),
        fixture(
            glm(),
            concat!(
                "<tool_call>add<arg_key>a</arg_key><arg_value>7</arg_value><arg_key>note</arg_key><arg_value>12",
                "</arg_value><arg_key>more</arg_key><arg_value>true</arg_value><arg_key>free</arg_key>",
                "<arg_value>two words</arg_value></tool_call>",
            ),
            "",
            "",
            &[noted],
        ),
        failing(glm(), "<tool_call>no name</tool_call>"),
        broken(glm(), "<tool_call>f<arg_key>x</arg_key></tool_call>", "<arg_key>x</arg_key>"),
    ]
}

fn pythonic() -> Vec<Fixture> {
    let python = || free(ToolFamily::Pythonic);
    // A list that had begun and cannot be read further: what is left is text, and it counts.
    let broken = |written, rest| {
        let mut broken = fixture(python(), written, "", rest, &[NOTHING]);
        broken.said.failures = 1;
        broken
    };
    let escaped: Call = ("add", r#"{"a":-7,"note":"it's \"1)\", [x=2]"}"#, true);
    vec![
        fixture(
            python(),
            " [get_weather(city='東京', days=[1, 2]), f()]",
            "",
            "",
            &[("get_weather", r#"{"city":"東京","days":[1,2]}"#, true), NOTHING],
        ),
        fixture(python(), "<|python_start|>[f()]<|python_end|>", "", "", &[NOTHING]),
        fixture(python(), r#"[add(a = -7, note='it\'s "1)", [x=2]',)]"#, "", "", &[escaped]),
        fixture(
            python(),
            "[f(x=None, y={'k': (True, 1.5)})]\nThat is all.",
            "",
            "\nThat is all.",
            &[("f", r#"{"x":null,"y":{"k":[true,1.5]}}"#, true)],
        ),
        // Lists of other things, and calls of tools that nobody offered.
        fixture(python(), "[1, 2, 3]", "", "[1, 2, 3]", &[]),
        fixture(python(), "[print(x=1)]", "", "[print(x=1)]", &[]),
        fixture(python(), "[f(1)]", "", "[f(1)]", &[]),
        fixture(python(), "[f(x=g())]", "", "[f(x=g())]", &[]),
        fixture(python(), "[link](http://a)", "", "[link](http://a)", &[]),
        fixture(python(), "Use [f()] for it.", "", "Use [f()] for it.", &[]),
        fixture(python(), "", "", "", &[]),
        broken("[f(), print(x=1)]", ", print(x=1)]"),
        broken("[f(), f(1)]", ", f(1)]"),
        broken("[f() f()]", " f()]"),
        {
            let mut half = fixture(python(), "[f(x=1, 2)]", "", "2)]", &[("f", r#"{"x":1"#, false)]);
            half.said.failures = 1;
            half
        },
    ]
}

#[test]
fn a_call_of_python_that_is_cut_keeps_what_was_whole_and_loses_nothing() {
    let said = read(&free(ToolFamily::Pythonic), ["[get_weather(city='東京', days=[1,"]);
    assert_eq!(vec![("get_weather".to_owned(), r#"{"city":"東京""#.to_owned(), false)], said.calls);
    assert_eq!(("days=[1,", 0), (said.text.as_str(), said.failures));
    let said = read(&free(ToolFamily::Pythonic), ["[f(), get_wea"]);
    assert_eq!((1, ", get_wea"), (said.calls.len(), said.text.as_str()));
}

#[test]
fn a_call_in_tags_that_is_cut_keeps_what_was_whole_and_loses_nothing() {
    let cut = "<tool_call>\n<function=get_weather>\n<parameter=city>\n東京\n</parameter>\n<parameter=days>\n[1,";
    let said = read(&free(ToolFamily::Qwen3Coder), [cut]);
    assert_eq!(vec![("get_weather".to_owned(), r#"{"city": "東京""#.to_owned(), false)], said.calls);
    assert_eq!(("<parameter=days>\n[1,", 0), (said.text.as_str(), said.failures));
}

fn constrained() -> Vec<Fixture> {
    let list = || Parsing { calls: Calls::List, ..Parsing::default() };
    let named = || Parsing { calls: Calls::Named("f".to_owned()), ..Parsing::default() };
    vec![
        fixture(
            list(),
            r#"[{"name": "f", "arguments": {"x": 1}}, {"name": "add", "arguments": {}}]"#,
            "",
            "",
            &[("f", r#"{"x": 1}"#, true), ("add", "{}", true)],
        ),
        fixture(list(), r#"[{"name": "f", "arguments": {"x""#, "", "", &[("f", r#"{"x""#, false)]),
        fixture(named(), " {\"x\": 1}\n", "", "", &[("f", "{\"x\": 1}", true)]),
        fixture(named(), r#"{"x": "#, "", "", &[("f", r#"{"x": "#, false)]),
        failing(named(), "no"),
    ]
}

fn corpus() -> Vec<Fixture> {
    [
        hermes(),
        llama(),
        mistral(),
        deepseek(),
        gpt_oss(),
        thoughts(),
        experimental(),
        tagged(),
        pythonic(),
        constrained(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Roughly as tokenizers cut: marks whole, words with the space before them, other characters alone.
fn tokens(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let mark = ["<|", "<｜", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<tool_call>", "</tool_call>"]
            .into_iter()
            .find(|mark| rest.starts_with(mark));
        let length = match mark {
            Some("<|" | "<｜") => rest.find('>').map_or(first.len_utf8(), |end| end + 1),
            Some(mark) => mark.len(),
            None => {
                let begin = first.len_utf8();
                let word = rest[begin..].find(|next: char| !next.is_alphanumeric()).unwrap_or(rest.len() - begin);
                if first.is_alphanumeric() || first == ' ' { begin + word } else { begin }
            }
        };
        parts.push(&rest[..length]);
        rest = &rest[length..];
    }
    parts
}

fn characters(text: &str) -> impl Iterator<Item = &str> {
    text.char_indices().map(|(at, character)| &text[at..at + character.len_utf8()])
}

#[test]
fn every_fixture_reads_as_it_should() {
    for Fixture { parsing, written, said } in corpus() {
        assert_eq!(said, read(&parsing, [written]), "{written}");
    }
}

#[test]
fn cut_at_every_place_and_at_every_token_a_fixture_reads_the_same() {
    for Fixture { parsing, written, said } in corpus() {
        for (at, _) in written.char_indices() {
            assert_eq!(said, read(&parsing, [&written[..at], &written[at..]]), "cut at {at}: {written}");
        }
        assert_eq!(said, read(&parsing, characters(written)), "character by character: {written}");
        let tokens = tokens(written);
        assert_eq!(written, tokens.concat());
        assert_eq!(said, read(&parsing, tokens), "token by token: {written}");
    }
}

#[test]
fn every_beginning_of_a_fixture_reads_as_a_beginning_of_it() {
    for Fixture { parsing, written, said } in corpus() {
        for (at, _) in written.char_indices() {
            let cut = read(&parsing, [&written[..at]]);
            assert!(cut.calls.len() <= said.calls.len());
            for ((name, arguments, ended), (of_whole, all, _)) in cut.calls.iter().zip(&said.calls) {
                assert_eq!(of_whole, name);
                assert!(all.starts_with(arguments.as_str()), "{arguments}");
                // A call is complete with the last byte of its arguments and not before.
                assert!(!ended || arguments == all, "cut at {at}: {written}");
            }
        }
    }
}

#[test]
fn hostile_text_takes_time_in_proportion_to_its_length() {
    let mut parsings: Vec<Parsing> = Vec::new();
    for Fixture { parsing, .. } in corpus() {
        if !parsings.contains(&parsing) {
            parsings.push(parsing);
        }
    }
    let begun = std::time::Instant::now();
    for unit in [" ", "<", "[", "{", "<tool_call>", "<｜tool▁call▁begin｜>", "<|channel|>", "\"", "a", "<think>", "```"]
    {
        let text = unit.repeat(50_000 / unit.len());
        for parsing in &parsings {
            read(parsing, characters(&text));
        }
    }
    // Ten million characters: seconds when each costs the same, and an hour when each costs the length before it.
    assert!(begun.elapsed().as_secs() < 240, "{:?}", begun.elapsed());
}

/// Fragments of all families, with `w` in places where it is text, a name or an argument.
fn fragment() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![
        "<function=f>",
        "</function>",
        "<parameter=w>",
        "</parameter>",
        "<arg_key>w",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "w ",
        " ",
        "\n",
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        "{\"a\": \"w\"}",
        "{\"name\": \"f\", \"arguments\": ",
        "{\"name\": \"f\"",
        "{\"parameters\": {\"x\": [\"w\"]}, \"name\": \"f\"}",
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "w{",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "function",
        "f\n```json\n",
        "\n```",
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "<|tool_call|>",
        "<|tool_call_begin|>",
        "functions.w:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "é",
    ])
}

/// Every pair of parsers but the channels, which have heads that are no text.
fn any_parsing() -> impl Strategy<Value = Parsing> {
    let tools = ToolFamily::ALL.iter().map(|(_, family)| *family).filter(|family| *family != ToolFamily::GptOss);
    let thoughts = ReasoningFamily::ALL.iter().map(|(_, family)| *family);
    let thoughts = thoughts.filter(|family| *family != ReasoningFamily::GptOss);
    let ends = [PromptEnd::Plain, PromptEnd::InThoughts, PromptEnd::BehindThoughts, PromptEnd::Constrained];
    (
        prop::option::of(prop::sample::select(tools.collect::<Vec<_>>())),
        prop::option::of(prop::sample::select(thoughts.collect::<Vec<_>>())),
        prop::sample::select(ends.to_vec()),
    )
        .prop_map(|(family, reasoning, prompt_end)| {
            let calls = family.map_or(Calls::List, |family| Calls::Free { family, tools: self::tools() });
            Parsing { reasoning, prompt_end, calls }
        })
}

fn cut_at<'a>(text: &'a str, cuts: &[prop::sample::Index]) -> Vec<&'a str> {
    let places: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let mut chosen: Vec<usize> = cuts.iter().map(|cut| places[cut.index(places.len())]).collect();
    chosen.extend([0, text.len()]);
    chosen.sort_unstable();
    chosen.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn any_text_reads_the_same_in_pieces_and_no_word_is_lost(
        fragments in prop::collection::vec(fragment(), 0..14),
        parsing in any_parsing(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let text = fragments.concat();
        let whole = read(&parsing, [text.as_str()]);
        prop_assert_eq!(&whole, &read(&parsing, cut_at(&text, &cuts)));
        let words = |text: &str| text.matches('w').count();
        let of_calls: usize = whole.calls.iter().map(|(name, arguments, _)| words(name) + words(arguments)).sum();
        prop_assert_eq!(words(&text), words(&whole.text) + words(&whole.reasoning) + of_calls, "{:?}", whole);
    }

    #[test]
    fn channels_read_the_same_in_pieces(
        fragments in prop::collection::vec(prop::sample::select(vec![
            "<|start|>", "assistant", "<|channel|>", "analysis", "final", "commentary", " to=functions.f",
            "<|constrain|>json", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "{\"a\": 1}", "{", "text ", " ", "<|",
        ]), 0..14),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let text = fragments.concat();
        let parsing = thinking(ReasoningFamily::GptOss, PromptEnd::Plain);
        prop_assert_eq!(read(&parsing, [text.as_str()]), read(&parsing, cut_at(&text, &cuts)));
    }
}
