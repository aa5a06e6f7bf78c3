//! The key that a server asks for.
//!
//! Whoever writes a manifest names the server and the key. A key is therefore not a file that a manifest names, but an
//! entry in a folder of the node, and says itself which server it may be sent to.

use std::{
    io,
    path::{Path, PathBuf},
};

use http::HeaderValue;
use kvist_errors::{Code, KvistError};

use crate::settings::wrong;

/// Names the folder; of the agent's environment, which its workers inherit.
pub(crate) const FOLDER_VARIABLE: &str = "KVIST_ATTACHED_KEYS";

/// Where a key is, and the server that it is for.
#[derive(Debug)]
pub(crate) struct Key {
    file: PathBuf,
    url: String,
}

impl Key {
    /// The key of a name, for a server.
    ///
    /// # Errors
    /// There is no such key, or it is for another server.
    pub(crate) fn find(folder: Option<&Path>, name: &str, url: &str) -> Result<Self, KvistError> {
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if name.is_empty() || !name.bytes().all(is_name) {
            return Err(wrong("api-key", "is the name of a key: letters, digits, '-' and '_'"));
        }
        let folder = folder.ok_or_else(|| wrong("api-key", format!("this node has no keys: {FOLDER_VARIABLE}")))?;
        let key = Self { file: folder.join(name), url: url.to_owned() };
        key.read()?;
        Ok(key)
    }

    /// The bearer. Read for each request, so that a new key is taken up without a restart.
    ///
    /// # Errors
    /// As for [`Key::find`].
    pub(crate) fn bearer(&self) -> Result<HeaderValue, KvistError> {
        let unusable = |_| KvistError::new(Code::EngineUnavailable, "the server's key cannot be used").before_start();
        let mut value = HeaderValue::try_from(format!("Bearer {}", self.read().map_err(unusable)?))
            .map_err(|_| KvistError::new(Code::EngineUnavailable, "the server's key cannot be used").before_start())?;
        value.set_sensitive(true);
        Ok(value)
    }

    /// The file's second line, where its first is the server's URL.
    fn read(&self) -> Result<String, KvistError> {
        let unreadable = |error: io::Error| wrong("api-key", format!("there is no such key: {}", error.kind()));
        let text = std::fs::read_to_string(&self.file).map_err(unreadable)?;
        let mut lines = text.lines().map(str::trim);
        let url = lines.next().unwrap_or_default().trim_end_matches('/');
        let key = lines.next().unwrap_or_default();
        if url != self.url {
            return Err(wrong("api-key", "is for another server: the first line of its file is not this URL"));
        }
        if key.is_empty() {
            return Err(wrong("api-key", "is empty: the second line of its file"));
        }
        Ok(key.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_goes_to_its_own_server_alone() {
        let folder = std::env::temp_dir().join(format!("kvist-keys-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("stock"), "http://h:1/\nsk-secret\n").unwrap();
        std::fs::write(folder.join("half"), "http://h:1\n").unwrap();
        let find = |name: &str, url: &str| Key::find(Some(&folder), name, url).map_err(|error| error.message);
        let key = find("stock", "http://h:1").unwrap();
        assert_eq!("Bearer sk-secret", key.bearer().unwrap());
        assert!(!format!("{:?}", key.bearer().unwrap()).contains("secret"));
        for (name, url, reason) in [
            ("stock", "http://h:2", "is for another server"),
            ("half", "http://h:1", "is empty"),
            ("none", "http://h:1", "there is no such key"),
            ("../stock", "http://h:1", "is the name of a key"),
        ] {
            let said = find(name, url).unwrap_err();
            assert!(said.contains(reason), "{said}");
        }
        assert!(Key::find(None, "stock", "http://h:1").unwrap_err().message.contains(FOLDER_VARIABLE));
        // Changed while it is used.
        std::fs::write(folder.join("stock"), "http://h:1\nsk-new\n").unwrap();
        assert_eq!("Bearer sk-new", key.bearer().unwrap());
        std::fs::write(folder.join("stock"), "http://h:2\nsk-new\n").unwrap();
        assert_eq!(Code::EngineUnavailable, key.bearer().unwrap_err().code);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
