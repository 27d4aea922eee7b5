output "group_names" {
  description = "Auto-scaling group of each shard, in order."
  value       = [for i in range(var.shards) : aws_autoscaling_group.this[tostring(i)].name]
}

output "volume_ids" {
  description = "Volume of each shard, in order; empty without volumes."
  value       = [for i in range(var.volume_gb > 0 ? var.shards : 0) : aws_ebs_volume.this[tostring(i)].id]
}

output "user_data" {
  description = "User data of each shard."
  value       = [for i in range(var.shards) : module.node[tostring(i)].user_data]
}
