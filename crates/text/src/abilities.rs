//! What a chat template does with tools and thoughts, found out by rendering small conversations.

use std::borrow::Cow;

use minijinja::value::{Serde, Value as Variable};
use serde_json::{Value, json};

use crate::{
    model::TextError,
    parse::{PromptEnd, ReasoningFamily, ToolFamily},
    python::JsonLayout,
    template::{Template, Variables},
};

/// A name that no template writes by itself.
const PROBE: &str = "kvist_probe";

/// What a template can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Abilities {
    /// Tools appear in the prompt.
    pub(crate) shows_tools: bool,
    /// Arguments of past calls have to be JSON text, not an object.
    pub(crate) wants_arguments_as_text: bool,
    /// A message that is nothing but calls has to have no content at all, not an empty one.
    pub(crate) wants_calls_without_content: bool,
    /// Thoughts of past turns go by the name `thinking`.
    pub(crate) calls_thoughts_thinking: bool,
    /// How the model writes calls.
    pub(crate) tools: Option<ToolFamily>,
    /// How it marks thoughts.
    pub(crate) reasoning: Option<ReasoningFamily>,
}

impl Abilities {
    pub(crate) fn of(source: &str, template: &Template) -> Self {
        let user = json!({"role": "user", "content": "hi"});
        let parameters = json!({"type": "object", "properties": {"kvist": {"type": "integer"}}, "required": ["kvist"]});
        let function = json!({"name": PROBE, "description": PROBE, "parameters": parameters});
        let tool = json!({"type": "function", "function": function});
        let render = |messages: &[Value], with_tools: bool| {
            template.render(Variables {
                messages: Variable::from(Serde(messages)),
                tools: with_tools.then(|| Variable::from(Serde([&tool]))),
                extra: Vec::new(),
                add_generation_prompt: true,
                now_unix_seconds: 0,
                bos_token: "",
                eos_token: "",
            })
        };
        let one = std::slice::from_ref(&user);
        let shows_tools = match render(one, true) {
            Ok(text) => text.contains(PROBE),
            // A template that refuses both wants another conversation than this one; its own word counts then.
            Err(_) => render(one, false).is_err(),
        };
        let writes_calls = |content: Value, arguments: Value| {
            let call = json!({"id": "abcdefghi", "type": "function",
                "function": {"name": PROBE, "arguments": arguments}});
            let messages = [
                user.clone(),
                json!({"role": "assistant", "content": content, "tool_calls": [call]}),
                json!({"role": "tool", "tool_call_id": "abcdefghi", "name": PROBE, "content": "1"}),
            ];
            let shows_json = |text: &String| text.contains(r#"{"kvist": 1}"#) || text.contains(r#"{"kvist":1}"#);
            render(&messages, true).is_ok_and(|text| shows_json(&text))
        };
        let arguments = |as_text: bool| {
            if as_text { Value::String(r#"{"kvist": 1}"#.to_owned()) } else { json!({"kvist": 1}) }
        };
        let content = |without: bool| if without { Value::Null } else { Value::String(String::new()) };
        let forms = [(false, false), (false, true), (true, false), (true, true)];
        let (wants_calls_without_content, wants_arguments_as_text) = forms
            .into_iter()
            .find(|(without, as_text)| writes_calls(content(*without), arguments(*as_text)))
            .unwrap_or_default();
        Self {
            shows_tools,
            wants_arguments_as_text,
            wants_calls_without_content,
            calls_thoughts_thinking: source.contains("message.thinking") || source.contains("message['thinking']"),
            tools: ToolFamily::of_template(source),
            reasoning: ReasoningFamily::of_template(source),
        }
    }

    /// A message as the template expects it: almost always the one that it is.
    pub(crate) fn adapted(self, message: &Value) -> Cow<'_, Value> {
        let has = |name| message.get(name).is_some();
        if has("tool_calls") || self.calls_thoughts_thinking && has("reasoning_content") {
            let mut message = message.clone();
            self.adapt(&mut message);
            return Cow::Owned(message);
        }
        Cow::Borrowed(message)
    }

    fn adapt(self, message: &mut Value) {
        let Some(message) = message.as_object_mut() else { return };
        if self.wants_arguments_as_text
            && let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut)
        {
            for call in calls {
                if let Some(arguments) = call.pointer_mut("/function/arguments")
                    && arguments.is_object()
                {
                    *arguments = JsonLayout::default().write(arguments).into();
                }
            }
        }
        if self.wants_calls_without_content
            && message.contains_key("tool_calls")
            && message.get("content").and_then(Value::as_str) == Some("")
        {
            message.insert("content".to_owned(), Value::Null);
        }
        let has_text = message.get("content").and_then(Value::as_str).is_some_and(|text| !text.is_empty());
        let has_calls = message.contains_key("tool_calls");
        // The template of gpt-oss refuses a message with both.
        if self.calls_thoughts_thinking
            && !(has_text && has_calls)
            && !message.contains_key("thinking")
            && let Some(thoughts) = message.get("reasoning_content").cloned()
        {
            message.insert("thinking".to_owned(), thoughts);
        }
    }
}

/// Where the end of a prompt leaves a model that marks its thoughts.
pub(crate) fn prompt_end(prompt: &str, family: ReasoningFamily) -> PromptEnd {
    let Some(form) = family.form() else { return PromptEnd::Plain };
    let prompt = prompt.trim_end();
    if prompt.ends_with(form.open) {
        PromptEnd::InThoughts
    } else if prompt.ends_with(form.close) {
        PromptEnd::BehindThoughts
    } else {
        PromptEnd::Plain
    }
}

/// The template, and what it can do.
pub(crate) fn load(source: &str) -> Result<(Option<Template>, Abilities), TextError> {
    if source.is_empty() {
        return Ok((None, Abilities::default()));
    }
    let template = Template::new(source)?;
    let abilities = Abilities::of(source, &template);
    Ok((Some(template), abilities))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn abilities(source: &str) -> Abilities {
        load(source).unwrap().1
    }

    #[test]
    fn tools_are_shown_or_they_are_not() {
        assert!(abilities("{% if tools %}{{ tools | tojson }}{% endif %}x").shows_tools);
        assert!(!abilities("{{ messages }}").shows_tools);
        assert!(!abilities("{% if tools %}{{ raise_exception('none') }}{% endif %}x").shows_tools);
        assert!(abilities("{{ raise_exception('a system prompt is needed') }}").shows_tools);
    }

    #[test]
    fn arguments_are_given_in_the_form_that_the_template_can_write() {
        let calls = |expression: &str| {
            format!(
                "{{% for message in messages %}}{{% for call in message.tool_calls or [] %}}{{{{ {expression} }}}}{{% endfor %}}{{% endfor %}}"
            )
        };
        let object = abilities(&calls("call.function.arguments | tojson"));
        let text = abilities(&calls("'json\n' + call.function.arguments"));
        assert_eq!((false, true), (object.wants_arguments_as_text, text.wants_arguments_as_text));
        let mut message = json!({"tool_calls": [{"function": {"arguments": {"a": [1]}}}]});
        object.adapt(&mut message);
        assert_eq!(json!({"a": [1]}), message["tool_calls"][0]["function"]["arguments"]);
        text.adapt(&mut message);
        assert_eq!(json!(r#"{"a": [1]}"#), message["tool_calls"][0]["function"]["arguments"]);
    }

    #[test]
    fn a_message_of_calls_alone_has_no_content_where_the_template_asks_for_that() {
        let deepseek = abilities(
            "{% for message in messages %}{% if message['content'] is none %}{% for call in message['tool_calls'] %}\
             {{ 'json' + call['function']['arguments'] }}{% endfor %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}",
        );
        assert!(deepseek.wants_calls_without_content && deepseek.wants_arguments_as_text);
        let mut message = json!({"content": "", "tool_calls": [{"function": {"arguments": {}}}]});
        deepseek.adapt(&mut message);
        assert_eq!(json!({"content": null, "tool_calls": [{"function": {"arguments": "{}"}}]}), message);
        let mut text = json!({"content": "x", "tool_calls": []});
        deepseek.adapt(&mut text);
        assert_eq!("x", text["content"]);
    }

    #[test]
    fn thoughts_of_the_past_have_the_name_that_the_template_knows() {
        let harmony = abilities("{{ message.thinking }}");
        let mut message = json!({"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": []});
        harmony.adapt(&mut message);
        assert_eq!("hm", message["thinking"]);
        let mut both = json!({"content": "x", "reasoning_content": "hm", "tool_calls": []});
        harmony.adapt(&mut both);
        assert_eq!(Value::Null, both["thinking"]);
    }

    #[test]
    fn a_prompt_may_open_or_close_thoughts() {
        let end = |prompt| prompt_end(prompt, ReasoningFamily::Qwen3);
        assert_eq!(PromptEnd::InThoughts, end("<|im_start|>assistant\n<think>\n"));
        assert_eq!(PromptEnd::BehindThoughts, end("<think>\n\n</think>\n\n"));
        assert_eq!(PromptEnd::Plain, end("<think><|im_end|>\n<|im_start|>assistant\n"));
    }
}
