//! Values as Python writes them: chat templates are written for Python and its spelling reaches the model.

use minijinja::{Value, value::ValueKind};
use serde_json::Value as Json;

/// `str(value)`.
pub(crate) fn text(value: &Value) -> String {
    let mut text = String::new();
    match value.as_str() {
        Some(plain) => text.push_str(plain),
        None => write_repr(value, &mut text),
    }
    text
}

fn write_repr(value: &Value, text: &mut String) {
    match value.kind() {
        ValueKind::None => text.push_str("None"),
        ValueKind::Bool => text.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => text.push_str(&float(number)),
            Err(_) => text.push_str(&value.to_string()),
        },
        ValueKind::String => write_quoted(value.as_str().unwrap_or_default(), text),
        ValueKind::Seq => {
            text.push('[');
            for (position, item) in value.try_iter().into_iter().flatten().enumerate() {
                if position > 0 {
                    text.push_str(", ");
                }
                write_repr(&item, text);
            }
            text.push(']');
        }
        ValueKind::Map => {
            text.push('{');
            for (position, key) in value.try_iter().into_iter().flatten().enumerate() {
                if position > 0 {
                    text.push_str(", ");
                }
                write_repr(&key, text);
                text.push_str(": ");
                write_repr(&value.get_item(&key).unwrap_or_default(), text);
            }
            text.push('}');
        }
        _ => text.push_str(&value.to_string()),
    }
}

/// A string in the quotes that Python chooses.
fn write_quoted(plain: &str, text: &mut String) {
    let quote = if plain.contains('\'') && !plain.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for character in plain.chars() {
        match character {
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\\' => text.push_str("\\\\"),
            other if other == quote => text.extend(['\\', other]),
            other if other < ' ' || other == '\u{7F}' => text.push_str(&format!("\\x{:02x}", u32::from(other))),
            other => text.push(other),
        }
    }
    text.push(quote);
}

/// `repr` of a float: an exponent below 1e-4 and from 1e16 on, with a sign and two digits.
fn float(number: f64) -> String {
    if !number.is_finite() {
        return if number.is_nan() {
            "nan"
        } else if number > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .to_owned();
    }
    let size = number.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = number.to_string();
    if text.contains('.') { text } else { text + ".0" }
}

/// How `json.dumps` lays out its text.
pub(crate) struct JsonLayout {
    pub(crate) ascii_only: bool,
    pub(crate) indent: Option<usize>,
    pub(crate) sort_keys: bool,
    /// Between items, and between key and value.
    pub(crate) separators: (String, String),
}

impl Default for JsonLayout {
    fn default() -> Self {
        let separators = (", ".to_owned(), ": ".to_owned());
        Self { ascii_only: false, indent: None, sort_keys: false, separators }
    }
}

impl JsonLayout {
    pub(crate) fn write(&self, value: &Json) -> String {
        let mut text = String::new();
        self.write_at(value, 0, &mut text);
        text
    }

    fn write_at(&self, value: &Json, depth: usize, text: &mut String) {
        match value {
            Json::Array(items) if !items.is_empty() => {
                text.push('[');
                for (position, item) in items.iter().enumerate() {
                    if position > 0 {
                        text.push_str(&self.separators.0);
                    }
                    self.new_line(depth + 1, text);
                    self.write_at(item, depth + 1, text);
                }
                self.new_line(depth, text);
                text.push(']');
            }
            Json::Object(map) if !map.is_empty() => {
                let mut entries: Vec<_> = map.iter().collect();
                if self.sort_keys {
                    entries.sort_by_key(|(key, _)| *key);
                }
                text.push('{');
                for (position, (key, item)) in entries.into_iter().enumerate() {
                    if position > 0 {
                        text.push_str(&self.separators.0);
                    }
                    self.new_line(depth + 1, text);
                    self.write_string(key, text);
                    text.push_str(&self.separators.1);
                    self.write_at(item, depth + 1, text);
                }
                self.new_line(depth, text);
                text.push('}');
            }
            Json::String(plain) => self.write_string(plain, text),
            Json::Number(number) if number.is_f64() => text.push_str(&float(number.as_f64().unwrap_or_default())),
            other => text.push_str(&other.to_string()),
        }
    }

    fn new_line(&self, depth: usize, text: &mut String) {
        if let Some(width) = self.indent {
            text.push('\n');
            text.extend(std::iter::repeat_n(' ', width * depth));
        }
    }

    fn write_string(&self, plain: &str, text: &mut String) {
        let quoted = Json::from(plain).to_string();
        if !self.ascii_only || quoted.is_ascii() {
            return text.push_str(&quoted);
        }
        for character in quoted.chars() {
            if character.is_ascii() {
                text.push(character);
            } else {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    text.push_str(&format!("\\u{unit:04x}"));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (number, expected) in [
            (0.0, "0.0"),
            (1.5, "1.5"),
            (100.0, "100.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e-7, "1.5e-07"),
            (0.0001, "0.0001"),
            (-2.5e300, "-2.5e+300"),
        ] {
            assert_eq!(expected, float(number));
        }
    }
}
