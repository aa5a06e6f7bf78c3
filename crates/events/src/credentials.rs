//! A user's credentials at NATS: a token that says who he is, and the key that proves it.

use std::fmt;

use nkeys::KeyPair;

use crate::EventsError;

const FIELD: &str = "credentials_file";

/// What a credentials file holds.
pub struct Credentials {
    jwt: String,
    key: KeyPair,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Credentials").finish_non_exhaustive()
    }
}

impl Credentials {
    /// Reads the text of a credentials file, as `nsc` writes it.
    ///
    /// # Errors
    /// It holds no token or no key of a user.
    pub fn parse(text: &str) -> Result<Self, EventsError> {
        let after = |mark: &str| {
            let mut lines = text.lines().skip_while(|line| !(line.starts_with("---") && line.contains(mark)));
            lines.nth(1).map(str::trim).filter(|line| !line.is_empty())
        };
        let malformed = || EventsError::File { field: FIELD, reason: "holds no NATS credentials".to_owned() };
        let jwt = after("BEGIN NATS USER JWT").ok_or_else(malformed)?.to_owned();
        let seed = after("BEGIN USER NKEY SEED").ok_or_else(malformed)?;
        Ok(Self { jwt, key: KeyPair::from_seed(seed).map_err(|_| malformed())? })
    }

    /// The token.
    #[must_use]
    pub fn jwt(&self) -> &str {
        &self.jwt
    }

    /// Proves the key's possession by signing what the server has made up.
    ///
    /// # Errors
    /// The key cannot sign.
    pub fn sign(&self, nonce: &[u8]) -> Result<Vec<u8>, EventsError> {
        self.key
            .sign(nonce)
            .map_err(|_| EventsError::File { field: FIELD, reason: "holds a key that cannot sign".to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_proves_itself_and_half_a_file_is_refused() {
        let key = KeyPair::new_user();
        let seed = key.seed().unwrap();
        let jwt = "-----BEGIN NATS USER JWT-----\nabc.def\n------END NATS USER JWT------\n";
        let text = format!("{jwt}\n***\n-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n");
        let credentials = Credentials::parse(&text).unwrap();
        assert_eq!("abc.def", credentials.jwt());
        key.verify(b"nonce", &credentials.sign(b"nonce").unwrap()).unwrap();
        for wrong in ["", jwt, &text.replace(&seed, "SUA"), &text.replace("JWT", "jot")] {
            assert!(Credentials::parse(wrong).is_err(), "{wrong}");
        }
    }
}
