//! Whether a server still lives, and how loaded it is.

use std::{sync::Weak, time::Duration};

use http::StatusCode;
use kvist_worker::EngineHost;
use tokio::time::{Instant, timeout};

use crate::{engine::Shared, metrics::ServerMetrics};

/// Between two looks.
const INTERVAL: Duration = Duration::from_secs(1);

/// Looks until the engine is dropped, or the server is dead: it says so itself, or has not answered for too long.
pub(crate) async fn run(shared: Weak<Shared>, host: EngineHost, dead_after: Duration) {
    let mut last_answer = Instant::now();
    loop {
        tokio::time::sleep(INTERVAL).await;
        let Some(shared) = shared.upgrade() else { return };
        let left = dead_after.saturating_sub(last_answer.elapsed());
        match timeout(left, shared.client.get("/health")).await {
            Ok(Ok(reply)) if reply.status == StatusCode::SERVICE_UNAVAILABLE => {
                return host.engine_failed("the server says that its engine is dead");
            }
            // Any other answer is one of a server that lives; not all have this page.
            Ok(Ok(_)) => last_answer = Instant::now(),
            Ok(Err(_)) | Err(_) if last_answer.elapsed() >= dead_after => {
                return host.engine_failed("the server does not answer any more");
            }
            Ok(Err(_)) | Err(_) => continue,
        }
        if let Ok(Ok(reply)) = timeout(dead_after, shared.client.get("/metrics")).await
            && reply.status.is_success()
        {
            shared.note_metrics(&host, &ServerMetrics::read(&String::from_utf8_lossy(&reply.body)));
        }
    }
}
