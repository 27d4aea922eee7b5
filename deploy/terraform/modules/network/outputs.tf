output "vpc_id" {
  description = "The VPC."
  value       = aws_vpc.this.id
}

output "public_subnet_ids" {
  description = "Subnets with public addresses, in the order of the zones."
  value       = [for zone in var.availability_zones : aws_subnet.public[zone].id]
}

output "machine_subnet_ids" {
  description = "Subnets for machines that accept no outside connections, in the order of the zones."
  value       = [for zone in var.availability_zones : var.nat_gateway ? aws_subnet.private[zone].id : aws_subnet.public[zone].id]
}

output "public_addresses" {
  description = "Whether machines of machine_subnet_ids need public addresses to reach AWS."
  value       = !var.nat_gateway
}

output "zone_id" {
  description = "The private DNS zone."
  value       = aws_route53_zone.this.zone_id
}

output "zone_arn" {
  description = "ARN of the private DNS zone."
  value       = aws_route53_zone.this.arn
}
