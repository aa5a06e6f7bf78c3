//! Admission as it is configured.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::ConfigError;

/// A class of requests.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassConfig {
    /// As requests name it.
    pub name: String,
    /// Share of tokens beside other classes; above 0.
    pub weight: f64,
}

/// What may start at once.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum AdmissionConfig {
    /// Everything.
    #[default]
    AllowAll,
    /// A number of requests; others wait.
    Concurrency {
        /// Requests that run; above 0.
        most_running: usize,
        /// Requests that wait; 0 for none.
        most_queued: usize,
        /// Longest wait.
        queue_timeout: Duration,
        /// Classes that share the places; none for one class of all.
        classes: Vec<ClassConfig>,
    },
}

/// How long a request may wait when nobody says.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest wait that can be configured.
const LONGEST_QUEUE_TIMEOUT: Duration = Duration::from_secs(86_400);

const MOST_CLASSES: usize = 64;

/// What people write.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    concurrency: Concurrency,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Concurrency {
    max_concurrent_requests: u32,
    #[serde(default)]
    max_queued_requests: u32,
    queue_timeout: Option<Value>,
    #[serde(default)]
    classes: Vec<Class>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Class {
    name: String,
    #[serde(default = "one")]
    weight: f64,
}

fn one() -> f64 {
    1.0
}

const FORMS: &str =
    "valid: \"allow_all\", or {concurrency: {maxConcurrentRequests, maxQueuedRequests, queueTimeout, classes}}";

impl AdmissionConfig {
    /// Reads a configuration value: `"allow_all"`, or `{concurrency: {...}}`.
    ///
    /// # Errors
    /// The value has another form, or a field makes no sense.
    pub fn from_value(value: &Value) -> Result<Self, ConfigError> {
        let written = match value {
            Value::String(word) if word == "allow_all" => return Ok(Self::AllowAll),
            Value::String(word) => return Err(ConfigError::new(format!("unknown admission \"{word}\"; {FORMS}"))),
            value => serde_json::from_value::<Written>(value.clone())
                .map_err(|error| ConfigError::new(format!("{error}; {FORMS}")).at("concurrency"))?,
        };
        let Concurrency { max_concurrent_requests, max_queued_requests, queue_timeout, classes } = written.concurrency;
        let wrong = |path: String, why: &str| Err(ConfigError::new(why).at(&path).at("concurrency"));
        if max_concurrent_requests == 0 {
            return wrong("maxConcurrentRequests".to_owned(), "must be above 0");
        }
        let queue_timeout = match queue_timeout.as_ref().map(read_duration) {
            None => QUEUE_TIMEOUT,
            Some(Some(timeout)) if timeout <= LONGEST_QUEUE_TIMEOUT => timeout,
            Some(_) => {
                let why = "must be a duration such as 30s, 500ms or 2m, or a number of seconds, up to 24h";
                return wrong("queueTimeout".to_owned(), why);
            }
        };
        if classes.len() > MOST_CLASSES {
            return wrong("classes".to_owned(), "has more than 64 entries");
        }
        for (position, class) in classes.iter().enumerate() {
            let others = classes.iter().take(position);
            if class.name.is_empty() || others.into_iter().any(|other| other.name == class.name) {
                return wrong(format!("classes[{position}].name"), "is empty or there twice");
            }
            if !(class.weight.is_finite() && class.weight > 0.0) {
                return wrong(format!("classes[{position}].weight"), "must be above 0");
            }
        }
        let class = |Class { name, weight }| ClassConfig { name, weight };
        Ok(Self::Concurrency {
            most_running: max_concurrent_requests as usize,
            most_queued: max_queued_requests as usize,
            queue_timeout,
            classes: classes.into_iter().map(class).collect(),
        })
    }
}

/// `500ms`, `30s`, `2m`, `1h`, or a number of seconds.
fn read_duration(value: &Value) -> Option<Duration> {
    let seconds = match value {
        Value::Number(seconds) => seconds.as_f64()?,
        Value::String(text) => {
            let text = text.trim();
            let units = [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
            let (number, unit) = units.into_iter().find_map(|(unit, seconds)| {
                let number = text.strip_suffix(unit)?;
                let is_number = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
                is_number.then(|| number.parse::<f64>().ok()).flatten().map(|number| (number, seconds))
            })?;
            number * unit
        }
        _ => return None,
    };
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_door_is_read_with_its_defaults() {
        assert_eq!(AdmissionConfig::AllowAll, AdmissionConfig::from_value(&json!("allow_all")).unwrap());
        let least = json!({"concurrency": {"maxConcurrentRequests": 3}});
        let expected = AdmissionConfig::Concurrency {
            most_running: 3,
            most_queued: 0,
            queue_timeout: Duration::from_secs(30),
            classes: Vec::new(),
        };
        assert_eq!(expected, AdmissionConfig::from_value(&least).unwrap());
        let timeout = |text: Value| {
            let value = json!({"concurrency": {"maxConcurrentRequests": 1, "queueTimeout": text}});
            match AdmissionConfig::from_value(&value) {
                Ok(AdmissionConfig::Concurrency { queue_timeout, .. }) => Some(queue_timeout.as_secs_f64()),
                _ => None,
            }
        };
        for (text, seconds) in [("500ms", 0.5), ("30s", 30.0), ("1.5m", 90.0), ("24h", 86_400.0), ("0s", 0.0)] {
            assert_eq!(Some(seconds), timeout(json!(text)), "{text}");
        }
        assert_eq!(Some(2.5), timeout(json!(2.5)));
        for wrong in [json!("30"), json!("-1s"), json!("s"), json!("1e3s"), json!("25h"), json!(true), json!(-1)] {
            assert_eq!(None, timeout(wrong.clone()), "{wrong}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_by_its_path_with_what_would_be_right() {
        let full = |name: &str, value: Value| {
            let mut fields = json!({"maxConcurrentRequests": 1});
            fields[name] = value;
            json!({ "concurrency": fields })
        };
        let twice = json!([{"name": "a"}, {"name": "a"}]);
        let weightless = json!([{"name": "a", "weight": 0}]);
        for (value, path, word) in [
            (json!("nosuch"), "", "allow_all"),
            (json!({"nosuch": {}}), "concurrency", "maxConcurrentRequests"),
            (json!({"concurrency": {}}), "concurrency", "missing field `maxConcurrentRequests`"),
            (full("maxConcurrent", json!(1)), "concurrency", "unknown field `maxConcurrent`"),
            (full("maxConcurrentRequests", json!(0)), "concurrency.maxConcurrentRequests", "above 0"),
            (full("maxQueuedRequests", json!(-1)), "concurrency", "invalid value"),
            (full("queueTimeout", json!("soon")), "concurrency.queueTimeout", "30s"),
            (full("classes", twice), "concurrency.classes[1].name", "twice"),
            (full("classes", weightless), "concurrency.classes[0].weight", "above 0"),
        ] {
            let error = AdmissionConfig::from_value(&value).unwrap_err();
            assert_eq!(path, error.path(), "{value}");
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
