//! Chat templates as Hugging Face renders them.

use minijinja::{
    Environment, Error, ErrorKind,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde, Value},
};

use crate::model::TextError;

const NAME: &str = "chat";

/// Variables of one rendering.
pub(crate) struct Variables<'a> {
    pub(crate) messages: &'a serde_json::Value,
    pub(crate) tools: Option<&'a serde_json::Value>,
    pub(crate) extra: Option<&'a serde_json::Map<String, serde_json::Value>>,
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
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| TextError::Template(error.to_string()))?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |state: &minijinja::State<'_, '_>, format: String| {
            let now = state.lookup("kvist_now_unix_seconds").and_then(|value| i64::try_from(value).ok());
            strftime(&format, now.unwrap_or(0))
        });
        environment.add_filter("tojson", to_json);
        // Endless loops in a template end with an error, not with the process.
        environment.set_fuel(Some(20_000_000));
        // `{% generation %}` marks spans for training; it renders as its content.
        let source = source
            .replace("{% generation %}", "")
            .replace("{%- generation %}", "")
            .replace("{%- generation -%}", "")
            .replace("{% generation -%}", "")
            .replace("{% endgeneration %}", "")
            .replace("{%- endgeneration %}", "")
            .replace("{%- endgeneration -%}", "")
            .replace("{% endgeneration -%}", "");
        environment.add_template_owned(NAME, source).map_err(|error| TextError::Template(error.to_string()))?;
        Ok(Self { environment })
    }

    pub(crate) fn render(&self, variables: &Variables<'_>) -> Result<String, TextError> {
        let mut context = serde_json::Map::new();
        for (key, value) in variables.extra.into_iter().flatten() {
            context.insert(key.clone(), value.clone());
        }
        context.insert("messages".to_owned(), variables.messages.clone());
        if let Some(tools) = variables.tools {
            context.insert("tools".to_owned(), tools.clone());
        }
        context.insert("add_generation_prompt".to_owned(), variables.add_generation_prompt.into());
        context.insert("bos_token".to_owned(), variables.bos_token.into());
        context.insert("eos_token".to_owned(), variables.eos_token.into());
        context.insert("kvist_now_unix_seconds".to_owned(), variables.now_unix_seconds.into());
        let template = self.environment.get_template(NAME).map_err(|error| TextError::Template(error.to_string()))?;
        template
            .render(Value::from(Serde(context)))
            .map_err(|error| TextError::Render(error.detail().map_or_else(|| error.to_string(), str::to_owned)))
    }
}

/// Python's `json.dumps(value, ensure_ascii=False)`, with its spaces, and with `indent` when asked for.
fn to_json(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    let _: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let json =
        serde_json::to_value(&value).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    let mut text = String::new();
    write_json(&json, indent, 0, &mut text);
    Ok(text)
}

fn write_json(value: &serde_json::Value, indent: Option<usize>, depth: usize, text: &mut String) {
    let new_line = |depth: usize, text: &mut String| {
        if let Some(width) = indent {
            text.push('\n');
            text.extend(std::iter::repeat_n(' ', width * depth));
        }
    };
    let separator = if indent.is_some() { "," } else { ", " };
    match value {
        serde_json::Value::Array(items) if !items.is_empty() => {
            text.push('[');
            for (position, item) in items.iter().enumerate() {
                if position > 0 {
                    text.push_str(separator);
                }
                new_line(depth + 1, text);
                write_json(item, indent, depth + 1, text);
            }
            new_line(depth, text);
            text.push(']');
        }
        serde_json::Value::Object(map) if !map.is_empty() => {
            text.push('{');
            for (position, (key, item)) in map.iter().enumerate() {
                if position > 0 {
                    text.push_str(separator);
                }
                new_line(depth + 1, text);
                text.push_str(&serde_json::Value::from(key.as_str()).to_string());
                text.push_str(": ");
                write_json(item, indent, depth + 1, text);
            }
            new_line(depth, text);
            text.push('}');
        }
        other => text.push_str(&other.to_string()),
    }
}

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
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        match characters.next() {
            Some('Y') => text.push_str(&year.to_string()),
            Some('m') => text.push_str(&format!("{month:02}")),
            Some('d') => text.push_str(&format!("{day:02}")),
            Some('B') => text.push_str(month_name),
            Some('b') => text.push_str(&month_name[..3]),
            Some('H') => text.push_str(&format!("{:02}", second / 3600)),
            Some('M') => text.push_str(&format!("{:02}", second / 60 % 60)),
            Some('S') => text.push_str(&format!("{:02}", second % 60)),
            Some('%') => text.push('%'),
            Some(other) => text.extend(['%', other]),
            None => text.push('%'),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!("29 Feb 2024 23:59:59", strftime("%d %b %Y %H:%M:%S", 1_709_251_199));
        assert_eq!("1970-01-01 January %", strftime("%Y-%m-%d %B %%", 0));
        assert_eq!("31.12.1999", strftime("%d.%m.%Y", 946_684_799));
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let render = |source: &str| {
            let value = serde_json::json!([{"a": {"b": [1, "é\n"], "c": {}}}]);
            let variables = Variables {
                messages: &value,
                tools: None,
                extra: None,
                add_generation_prompt: false,
                now_unix_seconds: 0,
                bos_token: "",
                eos_token: "",
            };
            Template::new(source).unwrap().render(&variables)
        };
        assert_eq!(r#"{"a": {"b": [1, "é\n"], "c": {}}}"#, render("{{ messages[0] | tojson }}").unwrap());
        assert_eq!(
            "{\n  \"b\": [\n    1,\n    \"é\\n\"\n  ],\n  \"c\": {}\n}",
            render("{{ messages[0].a | tojson(indent=2) }}").unwrap()
        );
        assert_eq!(Err(TextError::Render("no".to_owned())), render("{{ raise_exception('no') }}"));
    }
}
