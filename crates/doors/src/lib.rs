//! Doors: TLS of every listener and client, the role that a certificate states, and who may call what.
//!
//! A [`Door`] stands before a listener. It makes plain or encrypted connections of what comes in, and knows of each who
//! is on the other side: a [`Peer`]. A [`DoorLayer`] around a tonic server asks the one table of [`allowed_roles`]
//! whether that peer may make the call. [`ClientTls`] is the other end. Certificates are read again from disk while
//! both run; connections that are open keep what they were opened with.

mod client;
mod complaints;
mod files;
mod incoming;
mod layer;
mod pace;
mod peer;
mod role;
mod rotation;
mod rules;
mod server;
mod settings;
mod stream;
mod table;

pub use client::ClientTls;
pub use files::certificate_expiry;
pub use incoming::Incoming;
pub use layer::{DoorLayer, Guarded};
pub use peer::{Caller, Peer};
pub use role::{PeerRole, RolePattern};
pub use rules::{DoorRules, OpenService};
pub use server::{Door, DoorKind};
pub use settings::{ClientTlsSettings, DoorSettings};
pub use stream::DoorStream;
pub use table::{TableRow, allowed_roles, table};
