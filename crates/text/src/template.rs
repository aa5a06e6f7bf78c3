//! Chat templates as Hugging Face renders them.

use minijinja::{
    Environment, Error, ErrorKind, Output, State,
    syntax::SyntaxConfig,
    value::{Kwargs, Value, ValueKind},
};

use crate::{model::TextError, output_parts, python};

const NAME: &str = "chat";

/// Where the time of day stands among a template's variables.
const NOW: &str = "kvist_now_unix_seconds";

/// Endless loops in a template end with an error, not with the process.
const FUEL: u64 = 5_000_000;

/// Variables of one rendering.
pub(crate) struct Variables<'a> {
    pub(crate) messages: Value,
    /// None for no tools.
    pub(crate) tools: Option<Value>,
    pub(crate) extra: Vec<(String, Value)>,
    pub(crate) add_generation_prompt: bool,
    pub(crate) now_unix_seconds: i64,
    pub(crate) bos_token: &'a str,
    pub(crate) eos_token: &'a str,
}

/// A compiled template.
#[derive(Debug)]
pub(crate) struct Template {
    environment: Environment<'static>,
}

impl Template {
    pub(crate) fn new(source: &str) -> Result<Self, TextError> {
        let wrong = |error: Error| TextError::Template(error.to_string());
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(wrong)?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(write_value);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |state: &State<'_, '_>, format: String| {
            let now = state.lookup(NOW).and_then(|value| i64::try_from(value).ok());
            strftime(&format, now.unwrap_or(0))
        });
        environment.add_filter("tojson", to_json);
        environment.add_filter("string", |value: &Value| python::text(value));
        environment.set_fuel(Some(FUEL));
        let source = without_training_marks(source);
        let separated = output_parts::separated(&source).into_owned();
        environment.add_template_owned(NAME, separated).map_err(wrong)?;
        Ok(Self { environment })
    }

    pub(crate) fn render(&self, variables: Variables<'_>) -> Result<String, TextError> {
        let given = [
            ("messages", variables.messages),
            ("add_generation_prompt", variables.add_generation_prompt.into()),
            ("bos_token", variables.bos_token.into()),
            ("eos_token", variables.eos_token.into()),
            (NOW, variables.now_unix_seconds.into()),
        ];
        // Templates ask whether these are none; they are never undefined. Of two values of one name the last counts.
        let mut context = vec![(Value::from("tools"), Value::from(())), (Value::from("documents"), Value::from(()))];
        context.extend(variables.extra.into_iter().map(|(name, value)| (Value::from(name), value)));
        context.extend(given.map(|(name, value)| (Value::from(name), value)));
        context.extend(variables.tools.map(|tools| (Value::from("tools"), tools)));
        let template = self.environment.get_template(NAME).map_err(|error| TextError::Template(error.to_string()))?;
        template
            .render(Value::from_pairs(context))
            .map_err(|error| TextError::Render(error.detail().map_or_else(|| error.to_string(), str::to_owned)))
    }
}

/// Values appear in the text as Python writes them: `True`, `None`, `{'a': 1}`.
fn write_value(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Seq | ValueKind::Map => {
            out.write_str(&python::text(value)).map_err(Error::from)
        }
        _ => minijinja::escape_formatter(out, state, value),
    }
}

/// `{% generation %}` marks a span for training. It becomes a condition that always holds, so that the spaces around it
/// are treated as before.
fn without_training_marks(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let (open, close) = (start + 2, start + length);
        let tag = &rest[open..close];
        let word = tag.trim_matches(['-', '+', ' ', '\t', '\n']);
        let replacement = match word {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        text.push_str(&rest[..open]);
        match replacement {
            Some(replacement) => text.push_str(&tag.replace(word, replacement)),
            None => text.push_str(tag),
        }
        rest = &rest[close..];
    }
    text.push_str(rest);
    text
}

/// `json.dumps` with the arguments that Hugging Face's filter has.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let ascii_only: Option<bool> = options.get("ensure_ascii")?;
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<(String, String)> = options
        .get::<Option<Vec<String>>>("separators")?
        .and_then(|list| <[String; 2]>::try_from(list).ok())
        .map(Into::into);
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let json =
        serde_json::to_value(value).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    let between = if indent.is_some() { "," } else { ", " };
    let layout = python::JsonLayout {
        ascii_only: ascii_only.unwrap_or(false),
        indent,
        sort_keys: sort_keys.unwrap_or(false),
        separators: separators.unwrap_or_else(|| (between.to_owned(), ": ".to_owned())),
    };
    Ok(layout.write(&json))
}

const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// The conversions of `strftime` that templates use, in UTC. Days to dates as in Howard Hinnant's `civil_from_days`.
fn strftime(format: &str, unix_seconds: i64) -> String {
    let (days, second) = (unix_seconds.div_euclid(86_400), unix_seconds.rem_euclid(86_400));
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let month_name = MONTHS[usize::try_from(month - 1).unwrap_or(0).min(11)];
    // The epoch was a Thursday.
    let day_name = DAYS[usize::try_from((days + 3).rem_euclid(7)).unwrap_or(0)];
    let hour = second / 3600;
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let mut conversion = characters.next();
        // `%-d` leaves out the zero in front.
        let width = if conversion == Some('-') {
            conversion = characters.next();
            1
        } else {
            2
        };
        let number = match conversion {
            Some('m') => Some(month),
            Some('d') => Some(day),
            Some('y') => Some(year.rem_euclid(100)),
            Some('H') => Some(hour),
            Some('I') => Some((hour + 11) % 12 + 1),
            Some('M') => Some(second / 60 % 60),
            Some('S') => Some(second % 60),
            _ => None,
        };
        if let Some(number) = number {
            text.push_str(&format!("{number:0width$}"));
            continue;
        }
        match conversion {
            Some('Y') => text.push_str(&year.to_string()),
            Some('B') => text.push_str(month_name),
            Some('b') => text.push_str(&month_name[..3]),
            Some('A') => text.push_str(day_name),
            Some('a') => text.push_str(&day_name[..3]),
            Some('p') => text.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('Z') => text.push_str("UTC"),
            Some('%') | None => text.push('%'),
            Some(other) => text.extend(['%', other]),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use minijinja::value::Serde;
    use serde_json::{Value as Json, json};

    use super::*;

    fn render_with(source: &str, extra: Json) -> Result<String, TextError> {
        let Json::Object(extra) = extra else { panic!("an object") };
        Template::new(source)?.render(Variables {
            messages: Value::from(Serde(json!([{"a": {"b": [1, "é\n"], "c": {}}}]))),
            tools: None,
            extra: extra.into_iter().map(|(name, value)| (name, Value::from(Serde(value)))).collect(),
            add_generation_prompt: false,
            now_unix_seconds: 0,
            bos_token: "",
            eos_token: "",
        })
    }

    fn render(source: &str) -> Result<String, TextError> {
        render_with(source, json!({}))
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!("29 Feb 2024 23:59:59", strftime("%d %b %Y %H:%M:%S", 1_709_251_199));
        assert_eq!("1970-01-01 January % Thursday", strftime("%Y-%m-%d %B %% %A", 0));
        assert_eq!("31.12.1999", strftime("%d.%m.%Y", 946_684_799));
        assert_eq!("Thu 1/1/70 01:00 AM %q %", strftime("%a %-m/%-d/%y %I:%M %p %q %", 3600));
        assert_eq!("12 PM", strftime("%I %p", 43_200));
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        assert_eq!(r#"{"a": {"b": [1, "é\n"], "c": {}}}"#, render("{{ messages[0] | tojson }}").unwrap());
        assert_eq!(
            "{\n  \"b\": [\n    1,\n    \"é\\n\"\n  ],\n  \"c\": {}\n}",
            render("{{ messages[0].a | tojson(indent=2) }}").unwrap()
        );
        assert_eq!(
            r#"{"b":[1,"\u00e9\n"],"c":{}}"#,
            render("{{ messages[0].a | tojson(separators=(',', ':'), ensure_ascii=True) }}").unwrap()
        );
        assert_eq!(Err(TextError::Render("no".to_owned())), render("{{ raise_exception('no') }}"));
    }

    #[test]
    fn values_are_written_as_python_writes_them() {
        assert_eq!(
            "True None [1, 'x', \"it's\", 1.0] {'a': False}",
            render_with(
                "{{ t }} {{ n }} {{ l }} {{ d }}",
                json!({"t": true, "n": null, "l": [1, "x", "it's", 1.0], "d": {"a": false}})
            )
            .unwrap()
        );
        assert_eq!("True!", render("{{ true | string ~ '!' }}").unwrap());
    }

    #[test]
    fn tools_and_documents_are_none_and_not_undefined() {
        assert_eq!("none", render("{% if tools is none and documents is none %}none{% endif %}").unwrap());
    }

    #[test]
    fn training_marks_change_nothing() {
        let marked = "a\n{% if true %}\n  {%- generation %}\n  b\n{% endgeneration -%}\n c{% endif %}\n";
        let plain = marked.replace("endgeneration", "endif").replace("generation", "if true");
        assert_eq!(render(&plain), render(marked));
    }

    #[test]
    fn an_endless_template_ends() {
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{{ b }}{% endfor %}{% endfor %}";
        assert!(matches!(render(endless), Err(TextError::Render(_))));
    }
}
