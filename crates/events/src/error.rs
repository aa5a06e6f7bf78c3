//! What can go wrong, and what to do about it.

/// Why events cannot flow, or a message was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventsError {
    /// A name cannot be part of a subject: correct the setting.
    #[error("{field} {value:?} must be lower-case letters, digits and '-', and not empty")]
    Name {
        /// Which name.
        field: &'static str,
        /// As given.
        value: String,
    },
    /// The bus refuses the connection's settings: correct them. A bus that is merely away is no error.
    #[error("the bus cannot be used: {0}")]
    Bus(String),
    /// A file of the bus's settings cannot be used: correct the setting or the file.
    #[error("{field} {reason}")]
    File {
        /// Which setting.
        field: &'static str,
        /// What is wrong with the file.
        reason: String,
    },
    /// A statement cannot be understood; its source is fetched anew.
    #[error("malformed statement: {0}")]
    Malformed(&'static str),
    /// The address of a worker or KV master is none: correct it.
    #[error("{0} has an address that is none")]
    Address(String),
    /// A history ended before its end mark; it is asked for again.
    #[error("the history broke off")]
    BrokenOff,
    /// A setting of an attached engine cannot be right: correct it.
    #[error("attach {name:?}: {field} {reason}")]
    Attach {
        /// Name of the engine.
        name: String,
        /// Which setting.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A worker did not answer; it is asked again.
    #[error("the worker did not deliver its history: {0}")]
    Worker(String),
    /// A KV master did not answer; the workers are asked instead.
    #[error("the KV master did not deliver its index: {0}")]
    KvMaster(String),
}

impl EventsError {
    /// Whether somebody answered, and not with a whole history: worth telling apart from a peer that is merely away.
    pub(crate) fn is_broken_history(&self) -> bool {
        matches!(self, Self::BrokenOff | Self::Malformed(_))
    }
}
