//! What a parser has to know of the tools that may be called.

use serde_json::Value;

/// A tool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfferedTool {
    /// Its name.
    pub name: String,
    /// Parameters that are texts whatever they look like.
    texts: Vec<String>,
}

impl OfferedTool {
    /// A tool of a schema of its parameters.
    #[must_use]
    pub fn new(name: impl Into<String>, parameters: &Value) -> Self {
        let properties = parameters.get("properties").and_then(Value::as_object);
        let is_text = |schema: &Value| match schema.get("type") {
            Some(Value::String(kind)) => kind == "string",
            Some(_) => false,
            None => schema.get("enum").and_then(Value::as_array).is_some_and(|all| all.iter().all(Value::is_string)),
        };
        let texts = properties.into_iter().flatten().filter(|(_, schema)| is_text(schema));
        Self { name: name.into(), texts: texts.map(|(name, _)| name.clone()).collect() }
    }

    /// Whether a parameter is a text.
    #[must_use]
    pub(crate) fn takes_text(&self, parameter: &str) -> bool {
        self.texts.iter().any(|name| name == parameter)
    }
}
