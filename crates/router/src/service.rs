pub fn grpc_routes() {}
