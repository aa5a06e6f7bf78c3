//! API keys from a file.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use kvist_errors::{Code, KvistError};
use parking_lot::Mutex;

/// How much of a limit is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit {
    /// The most of a period.
    pub limit: u64,
    /// What is left of it.
    pub remaining: u64,
    /// Time until all of it is there again.
    pub reset: Duration,
}

/// What a caller's limits are and how it stands with them. Keys of a file have none, so nobody has any yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Of requests.
    pub requests: Option<RateLimit>,
    /// Of tokens.
    pub tokens: Option<RateLimit>,
}

/// Who asks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// Name of the key.
    pub name: Arc<str>,
    /// Salt that separates its caches from all others; empty for none.
    pub cache_salt: Arc<str>,
    /// Its limits.
    pub limits: RateLimits,
}

type Table = HashMap<[u8; 32], Caller>;

/// The keys that may ask. Only hashes are held; without a file everybody may.
#[derive(Debug)]
pub struct ApiKeys {
    file: Option<PathBuf>,
    table: ArcSwap<Table>,
    seen: Mutex<Option<(SystemTime, u64)>>,
}

impl ApiKeys {
    /// Reads the file: lines of `name:sha256hex[:cache_salt]`, `#` begins a comment line.
    ///
    /// # Errors
    /// The file cannot be read or a line is wrong; the error names the line and never its content.
    pub fn load(file: Option<PathBuf>) -> Result<Self, KvistError> {
        let keys = Self { file, table: ArcSwap::default(), seen: Mutex::new(None) };
        keys.reload_if_changed()?;
        Ok(keys)
    }

    /// Reads the file again when it has changed; true when it was read. A wrong file leaves the keys as they are.
    ///
    /// # Errors
    /// As for [`ApiKeys::load`].
    pub fn reload_if_changed(&self) -> Result<bool, KvistError> {
        let Some(file) = &self.file else { return Ok(false) };
        let unreadable = |error: std::io::Error| {
            KvistError::new(Code::InvalidArgument, "the API key file cannot be read").with_cause(error)
        };
        let metadata = std::fs::metadata(file).map_err(unreadable)?;
        let mark = (metadata.modified().map_err(unreadable)?, metadata.len());
        let mut seen = self.seen.lock();
        if *seen == Some(mark) {
            return Ok(false);
        }
        *seen = Some(mark);
        self.table.store(Arc::new(parse(&read(file)?)?));
        Ok(true)
    }

    /// Who presents this `Authorization` value.
    ///
    /// # Errors
    /// Keys are needed and this is none of them.
    pub fn check(&self, authorization: Option<&str>) -> Result<Caller, KvistError> {
        if self.file.is_none() {
            return Ok(Caller::default());
        }
        let key = authorization
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, key)| key.trim())
            .ok_or_else(|| KvistError::new(Code::InvalidApiKey, "an API key is needed: Authorization: Bearer KEY"))?;
        self.check_key(key)
    }

    /// Who presents this key.
    ///
    /// # Errors
    /// Keys are needed and this is none of them.
    pub fn check_key(&self, key: &str) -> Result<Caller, KvistError> {
        if self.file.is_none() {
            return Ok(Caller::default());
        }
        // Only the hash is looked up, so the time this takes says nothing of the keys.
        let digest = ring::digest::digest(&ring::digest::SHA256, key.as_bytes());
        let table = self.table.load();
        <[u8; 32]>::try_from(digest.as_ref())
            .ok()
            .and_then(|hash| table.get(&hash).cloned())
            .ok_or_else(|| KvistError::new(Code::InvalidApiKey, "the API key is wrong"))
    }
}

fn read(file: &Path) -> Result<String, KvistError> {
    std::fs::read_to_string(file)
        .map_err(|error| KvistError::new(Code::InvalidArgument, "the API key file cannot be read").with_cause(error))
}

fn parse(text: &str) -> Result<Table, KvistError> {
    let mut table = Table::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = |why: &str| KvistError::field(Code::InvalidArgument, format!("api_keys_file line {number}"), why);
        let mut parts = line.splitn(3, ':');
        let name = parts.next().filter(|name| !name.is_empty()).ok_or_else(|| wrong("has no name"))?;
        let hash = parts
            .next()
            .and_then(parse_hash)
            .ok_or_else(|| wrong("must be name:sha256hex[:cache_salt] with 64 hex digits"))?;
        let caller =
            Caller { name: name.into(), cache_salt: parts.next().unwrap_or_default().into(), ..Caller::default() };
        if table.insert(hash, caller).is_some() {
            return Err(wrong("repeats the key of another line"));
        }
    }
    Ok(table)
}

fn parse_hash(hex: &str) -> Option<[u8; 32]> {
    if hex.len() != 64 || !hex.is_ascii() {
        return None;
    }
    let mut hash = [0; 32];
    for (position, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(hex.get(2 * position..2 * position + 2)?, 16).ok()?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SHA-256 of `secret`.
    const SECRET: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

    #[test]
    fn keys_are_known_by_their_hash() {
        let keys = ApiKeys {
            file: Some(PathBuf::new()),
            table: ArcSwap::from_pointee(parse(&format!("# keys\n\nalice:{SECRET}:salt:with:colons\n")).unwrap()),
            seen: Mutex::new(None),
        };
        let alice = Caller { name: "alice".into(), cache_salt: "salt:with:colons".into(), ..Caller::default() };
        assert_eq!(Ok(alice), keys.check(Some("Bearer secret")));
        for wrong in [None, Some("secret"), Some("Bearer wrong"), Some("Basic secret")] {
            assert_eq!(Code::InvalidApiKey, keys.check(wrong).unwrap_err().code);
        }
        assert_eq!(Ok(Caller::default()), ApiKeys::load(None).unwrap().check(None));
    }

    #[test]
    fn a_wrong_line_is_named_and_not_shown() {
        for text in ["alice", "alice:12", ":00", &format!("a:{SECRET}\nb:{SECRET}")] {
            let message = parse(text).unwrap_err().message;
            assert!(message.contains("line ") && !message.contains(SECRET), "{message}");
        }
    }
}
