//! Values as Python writes them.

use serde_json::{Map, Number, Value};

/// Lists within lists; a model that writes more is not calling a tool.
const MOST_DEPTH: usize = 64;

/// Reads a value at the front of a text: texts, numbers, `True`, `False`, `None` and their forms in JSON, lists, tuples
/// and dictionaries whose keys are texts. Returns it with what follows; none when there is none, or no whole one.
pub(crate) fn read_literal(text: &str) -> Option<(Value, &str)> {
    read(text, MOST_DEPTH)
}

fn read(text: &str, depth: usize) -> Option<(Value, &str)> {
    match text.chars().next()? {
        quote @ ('"' | '\'') => read_text(text, quote).map(|(text, rest)| (Value::String(text), rest)),
        '[' => read_items(text.get(1..)?, ']', depth.checked_sub(1)?),
        '(' => read_items(text.get(1..)?, ')', depth.checked_sub(1)?),
        '{' => read_dictionary(text.get(1..)?, depth.checked_sub(1)?),
        _ => read_word(text),
    }
}

fn read_items(text: &str, close: char, depth: usize) -> Option<(Value, &str)> {
    let mut items = Vec::new();
    let mut rest = text.trim_start();
    loop {
        if let Some(rest) = rest.strip_prefix(close) {
            return Some((Value::Array(items), rest));
        }
        let (item, behind) = read(rest, depth)?;
        items.push(item);
        rest = behind_item(behind, close)?;
    }
}

fn read_dictionary(text: &str, depth: usize) -> Option<(Value, &str)> {
    let mut fields = Map::new();
    let mut rest = text.trim_start();
    loop {
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((Value::Object(fields), rest));
        }
        let quote = rest.chars().next().filter(|first| matches!(first, '"' | '\''))?;
        let (key, behind) = read_text(rest, quote)?;
        let (value, behind) = read(behind.trim_start().strip_prefix(':')?.trim_start(), depth)?;
        fields.insert(key, value);
        rest = behind_item(behind, '}')?;
    }
}

/// What follows an item: behind its comma, or the end of the list.
fn behind_item(text: &str, close: char) -> Option<&str> {
    let rest = text.trim_start();
    match rest.strip_prefix(',') {
        Some(rest) => Some(rest.trim_start()),
        None => rest.starts_with(close).then_some(rest),
    }
}

fn read_text(text: &str, quote: char) -> Option<(String, &str)> {
    let mut read = String::new();
    let mut rest = text.get(1..)?;
    loop {
        let at = rest.find([quote, '\\'])?;
        read.push_str(&rest[..at]);
        rest = &rest[at..];
        if let Some(behind) = rest.strip_prefix(quote) {
            return Some((read, behind));
        }
        let escape = rest.chars().nth(1)?;
        let behind = &rest[1 + escape.len_utf8()..];
        rest = match escape {
            'x' => push_code(behind, 2, &mut read)?,
            'u' => push_code(behind, 4, &mut read)?,
            'U' => push_code(behind, 8, &mut read)?,
            _ => {
                match escape {
                    'n' => read.push('\n'),
                    't' => read.push('\t'),
                    'r' => read.push('\r'),
                    '\n' => {}
                    '\\' | '\'' | '"' => read.push(escape),
                    // Python leaves what it does not know as it is.
                    other => read.extend(['\\', other]),
                }
                behind
            }
        };
    }
}

/// A character by its number in so many hexadecimal digits.
fn push_code<'a>(text: &'a str, digits: usize, read: &mut String) -> Option<&'a str> {
    let (code, rest) = text.split_at_checked(digits)?;
    read.push(char::from_u32(u32::from_str_radix(code, 16).ok()?)?);
    Some(rest)
}

/// A number, or a word that stands for a value.
fn read_word(text: &str) -> Option<(Value, &str)> {
    let is_of_word = |character: char| character.is_ascii_alphanumeric() || "+-._".contains(character);
    let end = text.find(|character| !is_of_word(character)).unwrap_or(text.len());
    let (word, rest) = text.split_at(end);
    let value = match word {
        "True" | "true" => Value::Bool(true),
        "False" | "false" => Value::Bool(false),
        "None" | "null" => Value::Null,
        _ => Value::Number(read_number(word)?),
    };
    Some((value, rest))
}

fn read_number(word: &str) -> Option<Number> {
    // Names of Rust's that Python does not write like this.
    if !word.bytes().any(|byte| byte.is_ascii_digit()) || word.contains("__") {
        return None;
    }
    let digits = word.replace('_', "");
    let whole = digits.strip_prefix('+').unwrap_or(&digits);
    whole.parse::<i64>().map(Number::from).ok().or_else(|| Number::from_f64(whole.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_those_of_python() {
        for (text, value) in [
            (r#"'it\'s "é"\n\x41\u00e9\q'"#, json!("it's \"é\"\nAé\\q")),
            (r#""a'b""#, json!("a'b")),
            ("-12", json!(-12)),
            ("+1_000", json!(1000)),
            ("1.5e3", json!(1500.0)),
            (".5", json!(0.5)),
            ("True", json!(true)),
            ("false", json!(false)),
            ("None", json!(null)),
            ("[1, 'a', [True], ]", json!([1, "a", [true]])),
            ("(1, 2)", json!([1, 2])),
            ("{'z': 1, \"a\": {'b': []}}", json!({"z": 1, "a": {"b": []}})),
            ("[ ]", json!([])),
        ] {
            assert_eq!(Some((value, " rest")), read_literal(&format!("{text} rest")), "{text}");
        }
    }

    #[test]
    fn what_is_no_whole_value_is_none() {
        let deep = "[".repeat(MOST_DEPTH + 1) + &"]".repeat(MOST_DEPTH + 1);
        for text in
            ["", "'a", "[1", "[1 2]", "{'a' 1}", "{1: 2}", "name", "f(1)", "nan", "1.2.3", r"'\u12'", "-", &deep]
        {
            assert_eq!(None, read_literal(text), "{text}");
        }
    }
}
