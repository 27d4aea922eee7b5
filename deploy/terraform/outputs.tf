output "tensorboard_url" {
  description = "Address of TensorBoard; without tensorboard_cidrs, start session_manager_commands.tensorboard first."
  value       = local.public_tensorboard ? "http://${module.learner.address}:6006" : "http://localhost:6006"
}

output "session_manager_commands" {
  description = "Commands for a shell on the learner, TensorBoard and the board on this computer, and the machines of any role."
  value = {
    board       = "aws ssm start-session --region ${local.region} --target $(${local.find_learner}) --document-name AWS-StartPortForwardingSession --parameters portNumber=6007,localPortNumber=6007"
    tensorboard = "aws ssm start-session --region ${local.region} --target $(${local.find_learner}) --document-name AWS-StartPortForwardingSession --parameters portNumber=6006,localPortNumber=6006"
    learner     = "aws ssm start-session --region ${local.region} --target $(${local.find_learner})"
    machines    = "aws ec2 describe-instances --region ${local.region} --filters Name=tag:Run,Values=${var.run} Name=instance-state-name,Values=running --query 'Reservations[].Instances[].[InstanceId,InstanceType,PrivateIpAddress,Tags[?Key==`Role`]|[0].Value]' --output table"
    logs        = "aws logs tail --region ${local.region} --follow ${module.observability.log_groups["learner"]}"
  }
}

locals {
  find_learner = "aws autoscaling describe-auto-scaling-groups --region ${local.region} --auto-scaling-group-names ${module.learner.group_name} --query 'AutoScalingGroups[0].Instances[0].InstanceId' --output text"
}

output "hourly_cost_usd" {
  description = "Estimated cost per hour in total and by part, from the example prices in prices.json (hourly_prices_usd overrides them), without traffic. A part and the total are null if a price is unknown (hourly_prices_usd)."
  value = {
    total = try(floor(sum(values(local.cost_parts_usd)) * 1000 + 0.5) / 1000, null)
    parts = { for part, usd in local.cost_parts_usd : part => try(floor(usd * 1000 + 0.5) / 1000, null) }
  }
}

output "bucket" {
  description = "Bucket with checkpoints, TensorBoard events and videos, under runs/RUN/."
  value       = module.artifacts.bucket
}

output "learner_address" {
  description = "Control address of the learner within the VPC."
  value       = local.run.learner
}

output "actor_machines" {
  description = "Number of actor machines, from actors and actors_per_machine."
  value       = local.actor_machines
}

output "groups" {
  description = "Auto-scaling groups by role."
  value = merge(
    {
      learner   = module.learner.group_name
      replay    = module.replay.group_names
      actor     = module.actors.group_name
      evaluator = var.evaluator ? module.evaluator[0].group_name : ""
    },
    { for peers in module.learner_peers : "learner-peer" => peers.group_name },
  )
}

output "user_data" {
  description = "User data of the machines, by role; it has no secrets."
  value = merge(
    {
      learner   = module.learner.user_data
      replay    = module.replay.user_data
      actor     = module.actors.user_data
      evaluator = var.evaluator ? module.evaluator[0].user_data : ""
    },
    { for peers in module.learner_peers : "learner-peer" => peers.user_data },
  )
}
