//! A KV master with the index of a real feed: `Bootstrap`, and nothing else.

use std::{net::SocketAddr, pin::Pin, sync::Arc};

use futures::{Stream, StreamExt as _};
use kvist_events::bootstrap_chunks;
use kvist_index::Index;
use kvist_proto::kvmaster::v1::{
    kv_master_service_server::{KvMasterService, KvMasterServiceServer},
    *,
};
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// A KV master of the script.
pub(crate) struct ScriptedKvMaster {
    address: SocketAddr,
    server: JoinHandle<()>,
}

impl ScriptedKvMaster {
    /// Serves an index; `most_parts` cuts each answer short.
    pub(crate) async fn start(index: Arc<Index>, most_parts: Option<usize>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = KvMasterServiceServer::new(Service { index, most_parts });
        let server = tonic::transport::Server::builder().add_service(service);
        let server = tokio::spawn(async move {
            server.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
        });
        Self { address, server }
    }

    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }
}

impl Drop for ScriptedKvMaster {
    fn drop(&mut self) {
        self.server.abort();
    }
}

struct Service {
    index: Arc<Index>,
    most_parts: Option<usize>,
}

#[tonic::async_trait]
impl KvMasterService for Service {
    type BootstrapStream = BoxStream<BootstrapResponse>;
    type WatchSourcesStream = BoxStream<WatchSourcesResponse>;

    async fn bootstrap(&self, request: Request<BootstrapRequest>) -> Result<Response<Self::BootstrapStream>, Status> {
        let parts = bootstrap_chunks(&self.index, &request.into_inner().worker_uids);
        let most_parts = self.most_parts.unwrap_or(parts.len());
        Ok(Response::new(futures::stream::iter(parts.into_iter().take(most_parts)).map(Ok).boxed()))
    }

    async fn lookup(&self, _: Request<LookupRequest>) -> Result<Response<LookupResponse>, Status> {
        Err(Status::unimplemented("not in the script"))
    }

    async fn watch_sources(
        &self,
        _: Request<WatchSourcesRequest>,
    ) -> Result<Response<Self::WatchSourcesStream>, Status> {
        Err(Status::unimplemented("not in the script"))
    }

    async fn stats(&self, _: Request<StatsRequest>) -> Result<Response<StatsResponse>, Status> {
        Err(Status::unimplemented("not in the script"))
    }

    async fn put_prefix(&self, _: Request<PutPrefixRequest>) -> Result<Response<PutPrefixResponse>, Status> {
        Err(Status::unimplemented("not in the script"))
    }

    async fn list_prefixes(&self, _: Request<ListPrefixesRequest>) -> Result<Response<ListPrefixesResponse>, Status> {
        Err(Status::unimplemented("not in the script"))
    }

    async fn delete_prefix(&self, _: Request<DeletePrefixRequest>) -> Result<Response<DeletePrefixResponse>, Status> {
        Err(Status::unimplemented("not in the script"))
    }
}
